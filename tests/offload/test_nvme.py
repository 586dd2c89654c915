"""The NVMe tier and disk faults: each ends in an error that names file, key and bytes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.config.offload import AioConfig
from launcher.errors import OffloadError
from launcher.offload import aio, directory
from launcher.offload.nvme import NvmeTier
from launcher.offload.tier import buffer

MIB = 1 << 20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NvmeTier]:
    made = NvmeTier(tmp_path, AioConfig(block_size=64 * 1024))
    yield made
    made.close()


def written(tier: NvmeTier, key: str, numel: int = 100_000) -> torch.Tensor:
    values = buffer(numel, torch.float32).normal_()
    tier.write(key, values).result()
    return values


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Make a system call fail."""

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("numel", [16 * 1024, 16 * 1024 + 3, 100_003])
@pytest.mark.parametrize("direct", [True, False])
def test_any_memory_comes_back(
    tmp_path: Path, numel: int, offset: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours in the same memory are unchanged, wherever the tensor begins and ends."""
    if not direct:
        monkeypatch.setattr(aio, "DIRECT", 0)
    tier = NvmeTier(tmp_path, AioConfig(block_size=16 * 1024, queue_depth=3))
    values, room = buffer(numel + 32, torch.float32).normal_(), buffer(numel + 32, torch.float32).zero_()
    future = tier.write("a", values[offset : offset + numel])
    future.result()
    tier.read("a", room[offset : offset + numel]).result()
    assert torch.equal(room[offset : offset + numel], values[offset : offset + numel])
    assert not room[:offset].any() and not room[offset + numel :].any()
    tier.close()


def test_many_keys_in_flight(tier: NvmeTier) -> None:
    values = {f"k{i}": torch.randn(20_000 + i) for i in range(40)}
    for future in [tier.write(key, tensor) for key, tensor in values.items()]:
        future.result()
    got = {key: torch.empty_like(tensor) for key, tensor in values.items()}
    for future in [tier.read(key, into) for key, into in got.items()]:
        future.result()
    assert all(torch.equal(values[key], got[key]) for key in values)


@pytest.mark.key("aio.block_size", "aio.queue_depth", "aio.intra_op_parallelism")
def test_size_and_number_of_requests_are_the_json_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AioConfig(block_size=128 * 1024, queue_depth=2, intra_op_parallelism=3)
    tier = NvmeTier(tmp_path, config)
    sizes, together = [], threading.Barrier(6, timeout=20)
    real = aio.DirectFile.write

    def write(self: aio.DirectFile, data: Any, offset: int) -> None:
        sizes.append(data.nbytes)
        together.wait()  # never opens unless six requests are under way at once
        real(self, data, offset)

    monkeypatch.setattr(aio.DirectFile, "write", write)
    tier.write("a", torch.zeros(12 * 128 * 1024, dtype=torch.uint8)).result()
    assert sizes == [128 * 1024] * 12
    assert sum(thread.name.startswith("offload-io") for thread in threading.enumerate()) == 6
    tier.close()


@pytest.mark.key("aio.checksum")
@pytest.mark.parametrize(
    ("place", "checksum", "found"),
    [(0, "samples", True), (4095, "samples", True), (2000, "samples", False), (2000, "all", True)],
)
def test_one_changed_byte(tmp_path: Path, place: int, checksum: str, found: bool) -> None:
    tier = NvmeTier(tmp_path, AioConfig(checksum=checksum))
    values = written(tier, "moment of layer.3")
    with open(tier.file, "r+b") as file:
        file.seek(40_960 + place)
        byte = file.read(1)
        file.seek(40_960 + place)
        file.write(bytes([byte[0] ^ 1]))
    into = torch.empty_like(values)
    if found:
        with pytest.raises(OffloadError, match=r"397,312 bytes of moment of layer\.3.*checksum") as told:
            tier.read("moment of layer.3", into).result()
        assert str(tier.file) in str(told.value)
    else:
        tier.read("moment of layer.3", into).result()
    tier.close()


def test_a_lost_page_is_found(tier: NvmeTier) -> None:
    """The most likely damage: one page of many has its content from before the last write."""
    written(tier, "a")
    before = tier.file.read_bytes()[40_960:45_056]
    values = written(tier, "a")
    with open(tier.file, "r+b") as file:
        file.seek(40_960)
        file.write(before)
    with pytest.raises(OffloadError, match="checksum"):
        tier.read("a", torch.empty_like(values)).result()


def test_a_truncated_file(tier: NvmeTier) -> None:
    values = written(tier, "a")
    written(tier, "b")
    os.truncate(tier.file, 450_000)
    tier.read("a", torch.empty_like(values)).result()
    with pytest.raises(
        OffloadError, match=r"reading [\d,]+ bytes of b at offset .* stopped after .* truncated"
    ):
        tier.read("b", torch.empty_like(values)).result()


def test_short_reads_and_writes_go_on_where_they_stopped(
    tier: NvmeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda fd, views, offset, real=real: real(fd, [views[0][:4096]], offset)
        )
    values = written(tier, "a")
    tier.read("a", into := torch.empty_like(values)).result()
    assert torch.equal(into, values)


def test_too_little_room_is_said_before_the_run(tier: NvmeTier, tmp_path: Path) -> None:
    there = os.statvfs(tmp_path)
    free = there.f_bavail * there.f_frsize
    with pytest.raises(
        OffloadError, match=r"1,000,000,000,000,000 bytes are needed, [\d,]+ are free"
    ) as told:
        tier.reserve(10**15)
    assert abs(int(str(told.value).split("needed, ")[1].split(" ")[0].replace(",", "")) - free) < 10**10


def test_what_is_reserved_is_taken_from_the_disk_at_once(tier: NvmeTier) -> None:
    tier.reserve(4 * MIB)
    assert tier.file.stat().st_blocks * 512 >= 4 * MIB
    written(tier, "a", MIB)
    assert tier.file.stat().st_size == 4 * MIB


def test_a_disk_that_fills_up(tier: NvmeTier) -> None:
    """The allocation of a key fails as a whole, and earlier data is still there."""
    values = written(tier, "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(
            OffloadError, match=r"allocating 4,194,304 bytes for b failed: .*exceed the size limit"
        ):
            tier.write("b", torch.zeros(MIB))
        with pytest.raises(OffloadError, match=r"reserving 4,194,304 bytes failed"):
            tier.reserve(4 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tier.file.stat().st_size < MIB
    tier.read("a", into := torch.empty_like(values)).result()
    assert torch.equal(into, values)
    tier.write("b", torch.zeros(10)).result()


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EIO, "I/O error of the disk")],
)
def test_an_error_while_writing(
    tier: NvmeTier, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tier, "a")
    refuse(monkeypatch, "pwritev", number)
    with pytest.raises(OffloadError, match=f"bytes of a at offset .* failed: .*{words}") as told:
        tier.write("a", torch.zeros(100_000)).result()
    assert str(tier.file) in str(told.value)


def test_a_path_that_is_missing_a_file_or_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OffloadError, match="no such directory") as told:
        NvmeTier(tmp_path / "missing")
    assert str(tmp_path / "missing") in str(told.value)
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="not a directory"):
        NvmeTier(tmp_path / "file")
    refuse(monkeypatch, "open", errno.EROFS)
    with pytest.raises(OffloadError, match="read-only"):
        NvmeTier(tmp_path)


@pytest.mark.parametrize("refused", ["open", "pwritev"])
def test_without_direct_io_it_is_said_and_works(
    tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Callable[..., Any] = getattr(os, refused)
    calls = []

    def refuses_once(*arguments: Any, **keywords: Any) -> Any:
        if not calls if refused == "pwritev" else arguments[1] & aio.DIRECT:
            calls.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, refused, refuses_once)
    monkeypatch.setattr("launcher.offload.aio.logger.propagate", True)
    tier = NvmeTier(tmp_path)
    assert "does not support O_DIRECT" in caplog.text
    values = written(tier, "a")
    tier.read("a", into := torch.empty_like(values)).result()
    assert torch.equal(into, values)
    tier.close()


def test_two_jobs_on_one_path_do_not_meet(tmp_path: Path) -> None:
    first, second = NvmeTier(tmp_path), NvmeTier(tmp_path)
    ours, theirs = written(first, "a"), written(second, "a")
    for tier, values in ((first, ours), (second, theirs)):
        tier.read("a", into := torch.empty_like(values)).result()
        assert torch.equal(into, values)
    second.close()
    first.read("a", into).result()
    assert torch.equal(into, ours)
    first.close()


def test_close_leaves_nothing(tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path)
    pending = tier.write("a", torch.zeros(MIB))
    tier.close()
    tier.close()
    assert pending.done() and not list(tmp_path.glob("launcher*"))


CRASHING = """
import os, signal, sys
from pathlib import Path
from launcher.offload.directory import OwnDirectory
OwnDirectory(Path(sys.argv[1]), 0).data.write_bytes(bytes(1 << 22))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_job_leaves_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory.logger, "propagate", True)
    living = NvmeTier(tmp_path)
    done = subprocess.run([sys.executable, "-c", CRASHING, tmp_path], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    left = set(tmp_path.glob("launcher*")) - {living.file.parent}
    assert len(left) == 1
    (tmp_path / "launcher-offload-elsewhere-rank0-x").mkdir()
    (tmp_path / "something.else").touch()
    tier = NvmeTier(tmp_path)
    assert "removed 4,194,304 bytes left by crashed jobs" in caplog.text
    assert not left.pop().exists() and living.file.exists() and (tmp_path / "something.else").exists()
    assert (tmp_path / "launcher-offload-elsewhere-rank0-x").exists()
    assert "a job of another machine" in caplog.text
    living.close()
    tier.close()


def test_a_key_under_way_is_left_alone(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    real = aio.DirectFile.write
    monkeypatch.setattr(aio.DirectFile, "write", lambda self, data, at: go.wait(20) and real(self, data, at))
    future = tier.write("a", torch.zeros(1000))
    with pytest.raises(OffloadError, match="a is still being read or written"):
        tier.read("a", torch.zeros(1000))
    go.set()
    future.result()
    tier.read("a", torch.zeros(1000)).result()
