"""`deepspeed.io`: writers for torch.save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.integrations.file_writers import (
    FastFileWriter,
    FastFileWriterConfig,
    MockFileWriter,
    PyFileWriter,
)
from launcher.integrations.refused import NotHere

STATE = {"weight": torch.arange(12.0).view(3, 4), "step": 7}


def fast(path: Path) -> FastFileWriter:
    return FastFileWriter(path, FastFileWriterConfig(None, torch.empty(0)))


@pytest.mark.parametrize("make", [PyFileWriter, fast])
@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_can_be_loaded(tmp_path: Path, make: type[PyFileWriter], zipped: bool) -> None:
    path = tmp_path / "state.pt"
    writer = make(path)
    torch.save(STATE, writer, _use_new_zipfile_serialization=zipped)
    writer.close()
    writer.close()
    found = torch.load(path)
    assert torch.equal(found["weight"], STATE["weight"]) and found["step"] == 7


def test_what_was_written_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state.pt"
    writer = MockFileWriter(path)
    torch.save(STATE, writer)
    writer.close()
    writer._dump_state()
    assert path.stat().st_size == 0
    real = PyFileWriter(tmp_path / "real.pt")
    torch.save(STATE, real)
    real.close()
    assert writer._stats["bytes"] == (tmp_path / "real.pt").stat().st_size
    assert f"'path': {path!r}" in capsys.readouterr().out


def test_storages_come_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "storages"
    first, second = torch.arange(3, dtype=torch.int16), torch.arange(2.0)
    writer = fast(path)
    pairs = [(one.untyped_storage(), one.dtype) for one in (first, second)]
    assert writer.save_torch_storage_object_list(pairs, True) == 8 + 6 + 8 + 8
    assert writer.save_torch_storage_object_list(pairs[:1], False) == 6
    writer.close()
    data = path.read_bytes()
    assert [int.from_bytes(data[at : at + 8], "little") for at in (0, 14)] == [3, 2]
    assert data[8:14] == data[30:] == first.numpy().tobytes() and data[22:30] == second.numpy().tobytes()


def test_several_writers_of_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotHere, match="each rank writes its own part"):
        FastFileWriter(tmp_path / "state", FastFileWriterConfig(None, torch.empty(0), num_parallel_writers=2))
