"""Corrupted and hostile checkpoints: the error names the file, and no code is run."""

from __future__ import annotations

import os
import pickle
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from launcher.checkpoint.store import load, load_meta, save
from launcher.errors import CheckpointError
from tests.checkpoint.forging import agree, of_first_format


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path, "a", {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}, {"step": 1})
    return tmp_path / "a"


def _load(checkpoint: Path) -> torch.Tensor:
    w = torch.zeros(1000)
    load(checkpoint.parent, "a", {"w": w})
    return w


class _Malice:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_pickle_with_code_is_refused_and_not_run(checkpoint: Path, tmp_path: Path) -> None:
    proof = tmp_path / "code-was-run"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Malice(proof)))
    agree(checkpoint, ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it refers to posix\.mkdir"):
        _load(checkpoint)
    assert not proof.exists()


class _EarlyPickler(pickle.Pickler):
    """Pickle Enum members as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, member: Any) -> Any:
        return (getattr, (type(member), member.name)) if isinstance(member, Enum) else NotImplemented


def test_what_early_pythons_wrote_is_read(checkpoint: Path) -> None:
    with (checkpoint / ".metadata").open("r+b") as file:
        metadata = pickle.load(file)
        file.seek(0)
        file.truncate()
        _EarlyPickler(file).dump(metadata)
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    agree(checkpoint, ".metadata")
    assert torch.equal(_load(checkpoint), torch.arange(1000.0))


@pytest.mark.parametrize("name", ["__init__", "__subclasses__"])
def test_attributes_of_other_things_are_refused(checkpoint: Path, name: str) -> None:
    class Reaching:
        def __reduce__(self) -> Any:
            return getattr, (Metadata, name)

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Reaching()))
    agree(checkpoint, ".metadata")
    with pytest.raises(CheckpointError, match=f"it refers to {name} of"):
        _load(checkpoint)


def test_code_in_the_metadata_of_one_rank_is_not_run_either(checkpoint: Path, tmp_path: Path) -> None:
    """torch looks for `__0.metadata` if `.metadata` cannot be read."""
    proof = tmp_path / "code-was-run"
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(_Malice(proof)))
    (checkpoint / ".metadata").write_bytes(b"")
    agree(checkpoint, ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        _load(checkpoint)
    assert not proof.exists()


def test_a_stored_object_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint that declares `w` an object would make torch call `torch.load(weights_only=False)`."""
    proof = tmp_path / "code-was-run"
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": _Malice(proof)}, checkpoint_id=checkpoint, no_dist=True)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    assert isinstance(metadata.state_dict_metadata["w"], BytesStorageMetadata)
    for name in (".metadata", "__0_0.distcp"):
        agree(checkpoint, name)
    with pytest.raises(CheckpointError, match="w is not a tensor"):
        _load(checkpoint)
    assert not proof.exists()


def test_a_path_that_leaves_the_checkpoint_is_refused(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    agree(checkpoint, ".metadata")
    with pytest.raises(CheckpointError, match="it refers to a file outside its directory: "):
        _load(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "meta.json", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "noise"])
def test_damage_names_the_file(checkpoint: Path, name: str, damage: str) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[:-7], "empty": b"", "noise": b"\x93" * len(content)}[damage])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        _load(checkpoint)


def test_one_wrong_bit_in_the_data_is_noticed(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.find(torch.arange(1000.0).numpy().tobytes())
    content[at + 2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp is damaged: checksum mismatch between bytes 0 and"
    ):
        _load(checkpoint)
    agree(checkpoint, "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read: the checksum"):
        _load(checkpoint)


def test_what_was_written_before_there_were_checksums_is_read_and_told(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_first_format(checkpoint)
    assert load_meta(checkpoint.parent) == ("a", {"step": 1})
    assert torch.equal(_load(checkpoint), torch.arange(1000.0))
    assert caplog.text.count("a has no checksums") == 2


def test_meta_says_at_once_that_a_file_is_cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 100 bytes instead of"):
        load_meta(checkpoint.parent)


def test_what_torch_wrote_itself_can_be_read(checkpoint: Path) -> None:
    """The allowed classes suffice for every dtype of a model or optimizer."""
    assert torch.equal(_load(checkpoint), torch.arange(1000.0))
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    tensors = {str(dtype): torch.ones(3, 2, dtype=dtype) for dtype in dtypes}
    save(checkpoint.parent, "b", tensors, {})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(checkpoint.parent, "b", loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
