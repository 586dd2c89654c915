"""Durable files: they are flushed to disk while they are written, and disk errors are reported."""

import errno
import os
from pathlib import Path

import pytest

from launcher.checkpoint import durable
from launcher.checkpoint.durable import DurableFile


def test_the_disk_writes_while_a_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_AT_ONCE", 1000)
    sizes = list[int]()
    monkeypatch.setattr(os, "fdatasync", lambda file: sizes.append(os.fstat(file).st_size))
    with DurableFile(tmp_path / "file") as file:
        for number in range(10):
            file.write(bytes([number]) * 20_000)
            file._settle()
        file.finish()
    assert sizes == [20_000 * count for count in range(1, 11)]
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([number]) * 20_000 for number in range(10))


@pytest.mark.parametrize("writes", [1, 5])
def test_what_the_disk_could_not_write_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """The kernel reports an error once; later calls succeed."""
    answers = iter([OSError(errno.EIO, os.strerror(errno.EIO))])

    def once(file: int) -> None:
        for error in answers:
            raise error

    monkeypatch.setattr(durable, "_AT_ONCE", 1000)
    monkeypatch.setattr(os, "fdatasync", once)
    with pytest.raises(OSError, match="Input/output error"), DurableFile(tmp_path / "file") as file:
        for _ in range(writes):
            file.write(bytes(20_000))
        file.finish()
