"""Streams tensors into Hugging Face safetensors files: the header first, then one tensor at a time.

The format: 8 bytes with the header's length, a JSON header with the dtype, shape and byte range of every
tensor, and the tensors' bytes, row-major and little-endian, without gaps
(github.com/huggingface/safetensors).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from launcher.checkpoint.durable import DurableFile, temporary_path
from launcher.errors import CheckpointError
from launcher.models.safetensors_format import DTYPE_OF_NAME, INDEX_FILE, SINGLE_FILE

_ALIGNMENT = 8
_PIECE = 1 << 26
"""Bytes handed to the file system at a time."""

Fetch = Callable[[], torch.Tensor | None]
ExportEntry = tuple[str, torch.dtype, Sequence[int], Fetch]

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}


@dataclass(frozen=True)
class _PlannedTensor:
    """A tensor and its place in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Fetch

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path_dir: str | Path, entries: Iterable[ExportEntry], max_shard_size: float = 5e9, writer: bool = True
) -> list[Path]:
    """Write tensors as safetensors files for `from_pretrained`, holding one tensor at a time.

    Every rank calls this with the same entries and fetches all of them in the same order; only the writer
    gets tensors and touches the disk. Files get their final names when all are complete, the index last, and
    files of an earlier export that would be read instead are removed. The caller writes config.json
    (`model.config.save_pretrained`).

    Args:
        path_dir: the directory; created if needed.
        entries: (name, dtype, shape, fetch) of every tensor. `fetch()` is a collective of all ranks. On the
            writer it returns the unsharded tensor, of that dtype and shape, on any device; on other ranks its
            result is ignored.
        max_shard_size: maximum bytes of tensors per file. If all tensors fit, one `model.safetensors` is
            written; otherwise numbered files and an index.
        writer: whether this rank writes.

    Returns:
        the files written; [] on the other ranks.

    Raises:
        CheckpointError: on the writer, if a file could not be written, or `fetch` returned another dtype or
            shape. It is raised after all tensors were fetched, so no rank is left waiting in a collective.
    """
    shards = _shards([_plan(*entry) for entry in entries], max_shard_size)
    export = _Export(Path(path_dir), shards)
    try:
        for number, shard in enumerate(shards):
            export.begin(number, writer)
            for planned in shard:
                export.write(planned, planned.fetch())
            export.end()
    except BaseException as error:  # also on Ctrl-C: leave no partial files
        export.discard(error)
        raise
    return export.finish() if writer else []


class _Export:
    """The files of the writer rank. After a failure it writes nothing more, and `finish` raises the error."""

    def __init__(self, directory: Path, shards: list[list[_PlannedTensor]]) -> None:
        self.directory = directory
        self.shards = shards
        self.names = _file_names(len(shards))
        self._own = {name: temporary_path(directory / name) for name in (*self.names, INDEX_FILE)}
        self.failure: BaseException | None = None
        self._file: DurableFile | None = None

    def begin(self, number: int, writer: bool) -> None:
        if not writer or self.failure:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = DurableFile(self._temporary(self.names[number]))
            self._file.write(_header(self.shards[number]))
        except OSError as error:
            self.discard(error)

    def write(self, planned: _PlannedTensor, tensor: torch.Tensor | None) -> None:
        if self._file is None:
            return
        try:
            _write_tensor(self._file, planned, tensor)
        except (OSError, CheckpointError) as error:
            self.discard(error)

    def end(self) -> None:
        if self._file is None:
            return
        try:
            self._file.finish()
            self._file.close()
            self._file = None
        except OSError as error:
            self.discard(error)

    def finish(self) -> list[Path]:
        """Rename the files to their final names; raise the error of an earlier failure."""
        if self.failure is None:
            try:
                return self._publish()
            except OSError as error:
                self.discard(error)
        if isinstance(self.failure, CheckpointError):
            raise self.failure
        raise CheckpointError(
            f"The weights could not be written: {self.failure}",
            where=str(self.directory),
            fix="free some space or choose another directory, and export again",
        ) from self.failure

    def _publish(self) -> list[Path]:
        # The old index is removed first, so that no reader gets a mixture of old and new files.
        (self.directory / INDEX_FILE).unlink(missing_ok=True)
        for path in self.directory.iterdir():
            if path.name not in self.names and re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", path.name):
                path.unlink(missing_ok=True)
        for name in self.names:
            os.replace(self._temporary(name), self.directory / name)
        written = [self.directory / name for name in self.names]
        if len(self.names) > 1:
            index = self._temporary(INDEX_FILE)
            index.write_text(json.dumps(_index(self.shards, self.names), indent=2), encoding="utf-8")
            os.replace(index, self.directory / INDEX_FILE)
            written.append(self.directory / INDEX_FILE)
        return written

    def _temporary(self, name: str) -> Path:
        return self._own[name]

    def discard(self, error: BaseException) -> None:
        """Stop writing, and remove the files written so far."""
        self.failure = error
        if self._file is not None:
            with contextlib.suppress(OSError):  # closing flushes, and may fail for the same reason
                self._file.close()
            self._file = None
        for name in self.names:
            with contextlib.suppress(OSError):
                self._temporary(name).unlink()


def _plan(name: str, dtype: torch.dtype, shape: Sequence[int], fetch: Fetch) -> _PlannedTensor:
    if dtype not in _DTYPE_NAMES:
        raise CheckpointError(
            f"{name} has dtype {dtype}, which safetensors does not support.", fix="convert it first"
        )
    return _PlannedTensor(name, dtype, tuple(shape), fetch)


def _shards(planned: list[_PlannedTensor], max_shard_size: float) -> list[list[_PlannedTensor]]:
    """Assign tensors to files in the given order; a tensor larger than `max_shard_size` gets its own file."""
    shards: list[list[_PlannedTensor]] = [[]]
    filled = 0
    for one in planned:
        if shards[-1] and filled + one.nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(one)
        filled += one.nbytes
    # Wide dtypes first: every tensor then begins at a multiple of its element size, which readers need.
    return [sorted(shard, key=lambda one: -one.dtype.itemsize) for shard in shards]


def _header(shard: list[_PlannedTensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for one in shard:
        header[one.name] = {
            "dtype": _DTYPE_NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [offset, offset + one.nbytes],
        }
        offset += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: IO[bytes], planned: _PlannedTensor, tensor: torch.Tensor | None) -> None:
    if tensor is None or tensor.dtype != planned.dtype or tuple(tensor.shape) != planned.shape:
        got = "nothing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise CheckpointError(
            f"Expected {planned.name} as {planned.shape} of {planned.dtype}, but got {got}.",
            where=planned.name,
        )
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, data.size, _PIECE):
        file.write(data[start : start + _PIECE].data)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _index(shards: list[list[_PlannedTensor]], names: list[str]) -> dict[str, object]:
    return {
        "metadata": {"total_size": sum(one.nbytes for shard in shards for one in shard)},
        "weight_map": {one.name: name for shard, name in zip(shards, names, strict=True) for one in shard},
    }
