"""Reads torch.distributed.checkpoint's files without running code from them.

torch reads tensor data with `torch.load(weights_only=True)`, but the `.metadata` file with a plain
`pickle.load`, and stored objects with `weights_only=False`. This module unpickles `.metadata` with a short
allow-list of harmless classes, and refuses stored objects.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from launcher.checkpoint.deepspeed.files import is_deepspeed
from launcher.checkpoint.names import METADATA_FILE, fsdp_directories
from launcher.errors import CheckpointError, first_names

T = TypeVar("T")
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "ChunkStorageMetadata",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # Megatron-Core stores its save plans in `.metadata`.
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
}


class _RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that allows only the classes of a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):  # the original directory
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle an Enum member
            return _memory_format
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which is not allowed in checkpoint metadata"
        )


def _memory_format(kind: object, name: str) -> _MEM_FORMAT_ENCODING:
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(
            f"it refers to {name} of {kind!r}, which is not allowed in checkpoint metadata"
        )
    return _MEM_FORMAT_ENCODING[name]


def read_metadata(directory: Path) -> Metadata:
    """Return the metadata of the checkpoint in `directory`: names, shapes, dtypes and chunk locations.

    Raises:
        CheckpointError: `.metadata` is missing or corrupted, or it refers to anything but tensors.
    """
    if is_deepspeed(directory):
        from launcher.checkpoint.deepspeed.reader import metadata_of

        return metadata_of(directory)
    if fsdp_directories(directory):
        from launcher.checkpoint.fsdp import open_fsdp

        return open_fsdp(directory).metadata
    metadata = read_stored(directory)
    if objects := [
        n for n, e in metadata.state_dict_metadata.items() if not isinstance(e, TensorStorageMetadata)
    ]:
        raise _unreadable(directory, f"{objects[0]} is not a tensor")
    metadata.storage_meta = StorageMeta()
    return metadata


def read_stored(directory: Path) -> Metadata:
    """Return the content of `.metadata`, including entries that are not tensors."""
    try:
        metadata = _RestrictedUnpickler(io.BytesIO((directory / METADATA_FILE).read_bytes())).load()
        _validate(metadata)
    except Exception as error:  # a corrupted pickle fails with almost any exception
        raise _unreadable(directory, str(error)) from error
    found: Metadata = metadata
    return found


def _unreadable(directory: Path, why: str) -> CheckpointError:
    path = directory / METADATA_FILE
    return CheckpointError(
        f"{path} cannot be read: {why}",
        where=str(path),
        fix="the checkpoint is incomplete, corrupted, or not written by launcher; load another checkpoint (tag)",
    )


def shapes_of(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of all stored tensors."""
    shapes = {name: shape_of(metadata, name) for name in metadata.state_dict_metadata}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def shape_of(metadata: Metadata, name: str) -> tuple[int, ...] | None:
    """Return the shape of a stored tensor; None if no tensor has that name."""
    entry = metadata.state_dict_metadata.get(name)
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def incomplete(metadata: Metadata) -> list[str]:
    """Return the names of tensors whose stored chunks do not cover them."""
    return [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        and sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size)
    ]


def overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether two stored chunks of a tensor have an element in common."""
    boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks if math.prod(chunk.sizes)]
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1  # a tensor without dims has one element
    # Sort along the dim with the most cuts, where the fewest boxes share a range and have to be compared.
    dim = max(range(len(boxes[0][0])), key=lambda dim: len({start[dim] for start, _ in boxes}))
    boxes.sort(key=lambda box: box[0][dim])
    for number, (start, size) in enumerate(boxes):
        for other, other_size in boxes[number + 1 :]:
            if other[dim] >= start[dim] + size[dim]:
                break  # sorted: all following boxes begin later, too
            if common_volume(start, size, other, other_size):
                return True
    return False


def covers(metadata: Metadata, name: str, wanted: torch.Tensor) -> bool:
    """Return whether the stored chunks cover all of `wanted`, an unsharded tensor or a flat slice."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    if math.prod(entry.size) == sum(math.prod(chunk.sizes) for chunk in entry.chunks):
        return True  # chunks do not overlap, so they cover all elements
    whole = [(torch.Size([0] * wanted.dim()), wanted.shape)]
    pieces = getattr(wanted, "__create_chunk_list__", None)
    boxes = whole if pieces is None else [(piece.offsets, piece.sizes) for piece in pieces()]
    return all(
        sum(common_volume(offsets, sizes, chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        == math.prod(sizes)
        for offsets, sizes in boxes
    )


def check_fit(where: Path, metadata: Metadata, tensors: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Check that a checkpoint contains the requested tensors, in these shapes.

    Raises:
        CheckpointError: a tensor is missing, incomplete or of another shape.
    """
    stored = {name: shape for name in tensors if (shape := shape_of(metadata, name)) is not None}
    missing = [name for name in tensors if name not in stored] if strict else []
    wrong = [
        f"{name} is {tuple(tensor.shape)} in the model and {stored[name]} in the checkpoint"
        for name, tensor in tensors.items()
        if name in stored and tuple(tensor.shape) != stored[name]
    ]
    ragged = [name for name in tensors if name in stored and not covers(metadata, name, tensors[name])]
    problems = [
        f"{len(names)} {what}: {first_names(names)}"
        for what, names in (("missing", missing), ("with a different shape", wrong), ("incomplete", ragged))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"The checkpoint does not fit the model: {'; '.join(problems)}.",
            where=str(where),
            fix="load it into the model that it was saved from; a checkpoint on node-local storage also "
            "needs the same ranks on the same nodes",
        )


def quietly(work: Callable[[], T]) -> T:
    """Call `work` without torch's warning that torch.distributed is disabled in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return work()


def common_volume(start: torch.Size, size: torch.Size, other: torch.Size, other_size: torch.Size) -> int:
    """Return the number of elements that two boxes share."""
    spans = zip(start, size, other, other_size, strict=True)
    return math.prod(max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in spans)


def _validate(metadata: Any) -> None:
    if not isinstance(metadata, Metadata):
        raise ValueError("it is not checkpoint metadata")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"it refers to a file outside its directory: {info.relative_path}")


def read_chunk(file: IO[bytes], info: _StorageInfo) -> IO[bytes]:
    """Return the bytes of one chunk, after verifying the checksums of torch.save, which torch.load ignores.

    Raises:
        ValueError, BadZipFile: the chunk is damaged.
    """
    file.seek(info.offset)
    chunk = io.BytesIO(file.read(info.length))
    with zipfile.ZipFile(chunk) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} at byte {info.offset} is wrong")
    chunk.seek(0)
    return chunk


class SafeReader(FileSystemReader):
    """torch's reader with metadata from `read_metadata` above, and with errors that name the file."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    # No **kwargs, or torch would look for (and unpickle) a metadata file of this rank.
    def read_metadata(self) -> Metadata:
        return self._metadata

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        return read_chunk(file, sinfo)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in per_file.items():
            path = Path(self.path) / file
            try:
                super().read_data(LoadPlan(items), planner).wait()
            except Exception as error:
                raise CheckpointError(
                    f"{path} cannot be read: {error}",
                    where=str(path),
                    fix="the file is missing, incomplete or corrupted; load another checkpoint (tag)",
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class TensorLoadPlanner(DefaultLoadPlanner):
    """torch's planner, except that it refuses to unpickle objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is an object, not a tensor; it is not loaded.")
