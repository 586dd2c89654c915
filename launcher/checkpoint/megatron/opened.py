"""Opens a Megatron-Core checkpoint in the torch_dist format, under Megatron's own names.

The tensors are in torch.distributed.checkpoint's files, and `common.pt` contains the values that are the same
on all ranks. The optimizer state is read if it is stored per parameter: that of the fp32 and float16
optimizers, and that of the distributed optimizer saved as "fully_reshardable".
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from launcher.checkpoint.deepspeed.unpickle import StandIn, load_any
from launcher.checkpoint.names import COMMON_FILE, ITERATION_FILE, LATEST_FILE, METADATA_FILE, is_megatron
from launcher.checkpoint.reader import read_chunk, read_stored
from launcher.errors import CheckpointError

WRITER = "Megatron-Core"
MASTERS = ("param", "fp32_param")
"""Names of the fp32 master weights among the states: of the distributed optimizer, and of the float16 one."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
_BUCKETS = "optimizer.distributed."
_INERT = r"megatron\.|argparse\.|signal\.|transformer_engine\.|nemo\."
_CALLED = {"opt_param_scheduler": "scheduler state", "rerun_state_machine": "rerun state"}
_SAID = {
    "num_floating_point_operations_so_far",
    "optimizer",
    "iteration",
    "args",
    "checkpoint_version",
    "content_metadata",
}
"""Keys of `common.pt` that are read, or contain no information about the run."""


@dataclass(frozen=True)
class MegatronFiles:
    """The content of a checkpoint; its tensors stay on disk.

    Args:
        tensors: shapes, dtypes, and locations in the files.
        common: content of `common.pt`, with inert stand-ins for objects.
    """

    directory: Path
    tensors: Metadata
    common: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> MegatronFiles:
        """Open a checkpoint.

        Raises:
            CheckpointError: a file is damaged, or contains an object of an unexpected class.
        """
        metadata, common = read_stored(directory), load_any(directory / COMMON_FILE, _INERT)
        if not isinstance(common, dict):
            raise wrong(directory / COMMON_FILE, "does not contain what Megatron-Core writes")
        try:
            entries = metadata.state_dict_metadata.items()
            metadata.state_dict_metadata = {
                name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)
            }
            _check_chunks(metadata)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise wrong(directory / METADATA_FILE, f"is damaged: {error}") from error
        made = cls(directory, metadata, common)
        made._check_common()
        return made

    def entry(self, key: str) -> TensorStorageMetadata:
        """Return the shape and dtype of a tensor."""
        entry = self.tensors.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    @cached_property
    def keys(self) -> dict[str, dict[str, str]]:
        """Return {kind ("model", or an optimizer state): {name of a tensor: its key in the files}}."""
        found: dict[str, dict[str, str]] = {"model": {}}
        for key in self.tensors.state_dict_metadata:
            if match := _STATE.fullmatch(key):
                found.setdefault(match[1], {})[match[2]] = key
            elif not key.startswith("optimizer.") and "rng_state" not in key:
                found["model"][key] = key
        return found

    @property
    def states(self) -> list[str]:
        """Return the names of the optimizer states, without the fp32 master weights."""
        return [kind for kind in self.keys if kind not in ("model", *MASTERS)]

    @property
    def args(self) -> dict[str, Any]:
        """Return the arguments of the run; {} if they were not saved."""
        args = self.common.get("args")
        return vars(args) if isinstance(args, StandIn) else {}

    @property
    def iteration(self) -> int:
        """Return the number of training steps."""
        return int(self.common["iteration"])

    @property
    def options(self) -> list[dict[str, Any]]:
        """Return the param groups. A model with experts may have two optimizers, each with its own."""
        inner = [one.get("optimizer", one) for one in self._optimizers]
        groups = [group for one in inner for group in one.get("param_groups") or ()]
        return [{key: _number(value) for key, value in group.items()} for group in groups]

    @property
    def steps(self) -> float | None:
        """Return the number of optimizer steps; None if it was not saved."""
        found = [group["step"] for group in self.options if "step" in group]
        for one in self._optimizers:
            states = [inner.get("state") for inner in (one, one.get("optimizer", {}))]
            found += [
                state["common_step"] for state in states if isinstance(state, dict) and "common_step" in state
            ]
        return max((float(_number(step)) for step in found), default=None)

    @property
    def loss_scale(self) -> float | None:
        """Return the loss scale of a run in fp16."""
        scalers = [one["grad_scaler"] for one in self._optimizers if isinstance(one.get("grad_scaler"), dict)]
        return next((float(_number(scaler["scale"])) for scaler in scalers if "scale" in scaler), None)

    @property
    def _optimizers(self) -> list[dict[str, Any]]:
        said = self.common.get("optimizer")
        several = said.values() if isinstance(said, dict) and 0 in said else [said]
        return [one for one in several if isinstance(one, dict)]

    def _check_common(self) -> None:
        """Validate the content of `common.pt` before any of it is used.

        Raises:
            CheckpointError: a value is missing or invalid.
        """
        path = self.directory / COMMON_FILE
        try:
            self.common["iteration"] = int(_number(self.common["iteration"]))
            if self.iteration < 0:
                raise ValueError(f"the iteration is {self.iteration}")
            rates = [isinstance(group.get("lr"), int | float) for group in self.options]
            if not all(rates) or (self.states and not rates):
                raise ValueError("the optimizer has no param groups with learning rates")
            _ = self.steps, self.loss_scale
        except (AttributeError, TypeError, ValueError, KeyError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise wrong(path, f"does not contain what Megatron-Core writes: {what}") from error

    def unread(self) -> list[str]:
        """Return descriptions of the content that launcher does not read."""
        left = sorted(_CALLED.get(key, str(key)) for key in self.common if key not in _SAID)
        if any(key.startswith(_BUCKETS) for key in self.tensors.state_dict_metadata):
            why = "it is stored in buckets; save with --dist-ckpt-optim-fully-reshardable to include it"
            left.insert(0, f"distributed optimizer state ({why})")
        return left

    def check_bytes(self) -> None:
        """Verify torch.save's checksums of `common.pt` and of the tensors.

        Raises:
            CheckpointError: a checksum is wrong, or a file is missing or too short.
        """
        places = self.tensors.storage_data.items()
        common = self.directory / COMMON_FILE
        if zipfile.is_zipfile(common) and zipfile.ZipFile(common).testzip():
            raise wrong(common, "is damaged: checksum mismatch")
        for _, info in places:
            path = self.directory / info.relative_path
            if not path.is_file() or path.stat().st_size < info.offset + info.length:
                raise wrong(path, "is too short" if path.is_file() else "is missing")
        named = [info for index, info in places if index.fqn in self.tensors.state_dict_metadata]
        # launcher writes one tensor under several names
        once = {(info.relative_path, info.offset): info for info in named}
        for info in once.values():
            path = self.directory / info.relative_path
            try:
                with path.open("rb") as file:
                    read_chunk(file, info)
            except (OSError, ValueError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
                raise wrong(path, f"cannot be read: {error}") from error


def directory_of(given: Path, tag: str | None) -> Path | None:
    """Return the Megatron checkpoint that `given` and `tag` refer to; None if there is none.

    `given` may be a checkpoint, or a directory of several.

    Raises:
        CheckpointError: the latest checkpoint is ambiguous, or the file that names it is wrong.
    """
    if is_megatron(given) and tag in (None, given.resolve().name):
        return given
    if tag is not None:
        return given / tag if Path(tag).name == tag and is_megatron(given / tag) else None
    file = given / ITERATION_FILE
    if not file.is_file():
        return None
    if (given / LATEST_FILE).exists():
        raise CheckpointError(
            f"{given} has checkpoints of Megatron-Core and of other programs: both {ITERATION_FILE} and "
            f"{LATEST_FILE} exist.",
            where=str(given),
            fix="choose the checkpoint with --tag",
        )
    said = file.read_text(errors="replace").strip()[:40]
    path = given / (f"iter_{int(said):07d}" if said.isdecimal() else said)
    if path.parent != given or not is_megatron(path):
        raise CheckpointError(
            f"{file} names {said!r}, but {path} is not a checkpoint in Megatron-Core's torch_dist format.",
            where=str(file),
            fix="pass the directory of the checkpoint itself (iter_0001000)",
        )
    return path


def wrong(path: Path, what: str) -> CheckpointError:
    """Return the error for a file that cannot be used."""
    return CheckpointError(
        f"{path} {what}.", where=str(path), fix="copy the file again, or choose another checkpoint"
    )


def _number(value: Any) -> Any:
    """Return the number in a one-element tensor; return other values unchanged."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_chunks(metadata: Metadata) -> None:
    """Check that every chunk is inside its tensor and has a location in the files.

    Raises:
        ValueError, AttributeError, TypeError: a check failed.
    """
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        size = tuple(entry.size)
        for chunk in entry.chunks:
            box = list(zip(chunk.offsets, chunk.sizes, size, strict=True))
            if any(at < 0 or count < 0 or at + count > whole for at, count, whole in box):
                raise ValueError(f"a chunk of {name} is outside its shape {list(size)}")
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise ValueError(f"it has no location for a chunk of {name}")
