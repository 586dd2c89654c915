"""Reads weights from a safetensors directory: a rank reads only the elements that it keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from launcher.errors import CheckpointError, first_names
from launcher.models.build import EMBEDDED
from launcher.models.fused import FusedExperts
from launcher.models.names import match_names
from launcher.models.safetensors_format import DTYPE_OF_NAME, INDEX_FILE, SINGLE_FILE

_FIRST = 4
"""Values in each dimension that a fingerprint reads."""


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a stored tensor, known without reading its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


class SafetensorsSource:
    """The tensors of a directory that `save_pretrained` wrote: `model.safetensors`, or files with an index.

    Raises:
        CheckpointError: there is no safetensors file, or a file is corrupted, truncated or missing; the error
            names it.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._infos: dict[str, TensorInfo] = {}
        self._fused: dict[str, FusedExperts] = {}
        self._files: dict[Path, Any] = {}
        if (self.directory / SINGLE_FILE).is_file():
            self._add_file(self.directory / SINGLE_FILE)
        elif (self.directory / INDEX_FILE).is_file():
            self._add_indexed(self.directory / INDEX_FILE)
        else:
            raise CheckpointError(
                f"{self.directory} has no weights in the safetensors format.",
                where=str(self.directory),
                fix=f"pass a directory with {SINGLE_FILE} or {INDEX_FILE}, as written by save_pretrained",
            )

    def names(self) -> dict[str, TensorInfo]:
        """Return stored name -> shape, dtype and file."""
        inside = {stored for fused in self._fused.values() for part in fused.parts for stored in part}
        return {name: info for name, info in self._infos.items() if name not in inside}

    def fuse(self, name: str, parts: Sequence[Sequence[str]]) -> None:
        """Present the tensors of experts as one fused tensor [experts, rows of all parts, ...] instead; do
        nothing if their shapes or dtypes do not allow it.

        Args:
            parts: for each part, the stored names by expert.
        """
        infos = [[self._info(stored) for stored in part] for part in parts]
        kinds = [{(info.shape, info.dtype) for info in part} for part in infos]
        firsts = [part[0] for part in infos]
        alike = all(len(kind) == 1 for kind in kinds) and len({(f.shape[1:], f.dtype) for f in firsts}) == 1
        if not alike or not firsts[0].shape:
            return
        rows = tuple(first.shape[0] for first in firsts)
        fused = FusedExperts(tuple(map(tuple, parts)), rows, firsts[0].shape[1:])
        self._fused[name] = fused
        self._infos[name] = TensorInfo(fused.shape, firsts[0].dtype, firsts[0].file)

    def read_box(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return the box of `sizes` at index `offsets` of tensor `name`, in the stored dtype.

        Only these elements are read from the file.

        Raises:
            CheckpointError: there is no such tensor, the box exceeds it, or the file cannot be read.
        """
        info = self._info(name)
        index = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        if len(index) != len(info.shape) or any(
            not 0 <= part.start <= part.stop <= extent for part, extent in zip(index, info.shape, strict=True)
        ):
            raise CheckpointError(
                f"Cannot read a box of {tuple(sizes)} at {tuple(offsets)} from {name}, whose shape is {info.shape}.",
                where=str(info.file),
            )
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=info.dtype)
        if name in self._fused:
            return self._fused[name].read(offsets, sizes, self.read_box)
        try:
            file = self._files[info.file]
            read: torch.Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _unreadable(info.file, error) from error
        return read

    def match_names(self, model: PreTrainedModel) -> dict[str, str] | None:
        """Map the model's parameters and persistent buffers to stored names:
        `launcher.models.names.match_names`."""
        return match_names(model, self)

    def fingerprint(self) -> str:
        """Return a checksum of the names, shapes and first values of all tensors, as they are stored.

        It tells weights apart that were trained differently, and reads little.
        """
        digest = xxhash.xxh3_64()
        for name in sorted(self._infos.keys() - self._fused.keys()):
            info = self._infos[name]
            corner = tuple(min(_FIRST, size) for size in info.shape)
            first = self.read_box(name, (0,) * len(corner), corner)
            digest.update(f"{name}{info.shape}{info.dtype}{first.double().flatten().tolist()}".encode())
        return digest.hexdigest()

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise CheckpointError(f"The weights have no tensor {name!r}.", where=str(self.directory))
        return self._infos[name]

    def _add_file(self, path: Path) -> set[str]:
        try:
            # safe_open validates the header and checks the file's length against it.
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                stored = file.get_slice(name)
                self._infos[name] = TensorInfo(
                    tuple(stored.get_shape()), DTYPE_OF_NAME[stored.get_dtype()], path
                )
        except KeyError as error:
            raise CheckpointError(
                f"{path} contains tensors of the unsupported dtype {error}.",
                where=str(path),
                fix="convert the weights to another dtype first",
            ) from error
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _unreadable(path, error) from error
        self._files[path] = file
        return set(file.keys())

    def _add_indexed(self, index: Path) -> None:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(index, error) from error
        for file in files:
            path = self.directory / file
            if Path(file).name != file or not path.is_file():
                raise CheckpointError(
                    f"{index.name} lists the file {file!r}, which is not in the directory.",
                    where=str(index),
                    fix="copy or download the missing file",
                )
            expected = {name for name, where in weight_map.items() if where == file}
            if absent := sorted(expected - self._add_file(path)):
                raise CheckpointError(
                    f"{path} lacks tensors that {index.name} lists for it: {first_names(absent)}.",
                    where=str(path),
                    fix="copy or download the file again",
                )


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error}",
        where=str(path),
        fix="the file is corrupted or incomplete; copy or download it again",
    )


def weights_directory(name: str) -> Path | None:
    """Return the directory with the safetensors of `--model`; None for a bare config or an embedded model."""
    path = Path(name).expanduser()
    if name in EMBEDDED or path.is_file():
        return None
    if path.is_dir():
        return path if any(path.glob("*.safetensors")) else None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(
            f"no such file or directory: {name}",
            where=f"--model {name}",
            fix="pass a local directory written by save_pretrained, a config.json, or a name on the "
            "Hugging Face Hub",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        raise CheckpointError(
            f"could not download the weights of {name!r} from the Hugging Face Hub: {error}",
            where=f"--model {name}",
            fix="pass a local directory written by save_pretrained, or only a config.json to train "
            "from scratch",
        ) from error
