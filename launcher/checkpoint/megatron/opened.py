"""A checkpoint of Megatron-Core in its torch_dist format, under Megatron's own names.

The tensors lie in torch.distributed.checkpoint's files, and `common.pt` has what is alike on all ranks. The optimizer's
state is found where it lies by parameter: that of the fp32 and float16 optimizers, and of the distributed one saved as
"fully_reshardable".
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.checkpoint.deepspeed.unpickle import StandIn, load_any
from launcher.checkpoint.names import COMMON_FILE, ITERATION_FILE, is_megatron
from launcher.checkpoint.reader import read_chunk, read_stored
from launcher.errors import CheckpointError

WRITER = "Megatron-Core"
MASTERS = ("param", "fp32_param")
"""States that are the weights in fp32: of the distributed optimizer, and of the float16 one."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
_BUCKETS = "optimizer.distributed."
_INERT = r"megatron\.|argparse\.|signal\.|transformer_engine\.|nemo\."
_SAID = {"optimizer", "iteration", "args", "checkpoint_version", "content_metadata"}
"""Keys of `common.pt` that are read, or say nothing of the run."""


@dataclass(frozen=True)
class MegatronFiles:
    """The content of a checkpoint; its tensors stay on the disk.

    Args:
        tensors: shapes, dtypes, and where in which file they are.
        common: of `common.pt`, with inert stand-ins for objects.
    """

    directory: Path
    tensors: Metadata
    common: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> MegatronFiles:
        """Open a checkpoint.

        Raises:
            CheckpointError: a file is damaged, or has an object of a class that no such file needs.
        """
        metadata, common = read_stored(directory), load_any(directory / COMMON_FILE, _INERT)
        if not isinstance(common, dict):
            raise wrong(directory / COMMON_FILE, "is not what Megatron-Core writes")
        entries = metadata.state_dict_metadata.items()
        metadata.state_dict_metadata = {
            name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)
        }
        return cls(directory, metadata, common)

    def entry(self, key: str) -> TensorStorageMetadata:
        """Return shape and dtype of a tensor."""
        entry = self.tensors.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    @cached_property
    def keys(self) -> dict[str, dict[str, str]]:
        """Return kind ("model", or a state of the optimizer) -> name of a tensor -> its key in the files."""
        found: dict[str, dict[str, str]] = {"model": {}}
        for key in self.tensors.state_dict_metadata:
            if match := _STATE.fullmatch(key):
                found.setdefault(match[1], {})[match[2]] = key
            elif not key.startswith("optimizer.") and "rng_state" not in key:
                found["model"][key] = key
        return found

    @property
    def states(self) -> list[str]:
        """Return the states of the optimizer, without the weights in fp32."""
        return [kind for kind in self.keys if kind not in ("model", *MASTERS)]

    @property
    def args(self) -> dict[str, Any]:
        """Return the arguments of the run; {} where it was saved without."""
        args = self.common.get("args")
        return vars(args) if isinstance(args, StandIn) else {}

    @property
    def iteration(self) -> int:
        """Return how many steps were made."""
        said = self.common.get("iteration")
        return said if isinstance(said, int) else 0

    @property
    def options(self) -> list[dict[str, Any]]:
        """Return the param groups. A model with experts may have two optimizers, each with its own."""
        said = self.common.get("optimizer")
        several = said.values() if isinstance(said, dict) and 0 in said else [said]
        inner = [one.get("optimizer", one) for one in several if isinstance(one, dict)]
        return [dict(group) for one in inner for group in one.get("param_groups") or ()]

    @property
    def steps(self) -> float | None:
        """Return how many steps the optimizer has made."""
        found = [group["step"] for group in self.options if "step" in group]
        found += [one["common_step"] for one in _dicts(self.common.get("optimizer")) if "common_step" in one]
        return max(map(float, found), default=None)

    def unread(self) -> list[str]:
        """Return what launcher does not take from it."""
        left = sorted(str(key) for key in self.common if key not in _SAID)
        if any(key.startswith(_BUCKETS) for key in self.tensors.state_dict_metadata):
            why = "it lies in buckets; save with --dist-ckpt-optim-fully-reshardable to take it along"
            left.insert(0, f"the state of the distributed optimizer ({why})")
        return left

    def check_bytes(self) -> None:
        """Compare the bytes of `common.pt` and of the tensors with the checksums that torch.save wrote.

        Raises:
            CheckpointError: they differ, or a file is too short.
        """
        places = self.tensors.storage_data.items()
        common = self.directory / COMMON_FILE
        with zipfile.ZipFile(common) as archive:
            if archive.testzip():
                raise wrong(common, "is damaged: it is not what was written")
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
    """Return the checkpoint that is meant by a directory, which may be one or have several; None: it has none of
    Megatron's.

    Raises:
        CheckpointError: the file that says which one is the latest names none.
    """
    if is_megatron(given) and tag in (None, given.resolve().name):
        return given
    if tag is not None:
        return given / tag if is_megatron(given / tag) else None
    file = given / ITERATION_FILE
    if not file.is_file():
        return None
    said = file.read_text(errors="replace").strip()[:40]
    path = given / (f"iter_{int(said):07d}" if said.isdecimal() else said)
    if path.parent != given or not is_megatron(path):
        raise CheckpointError(
            f"{file} says {said!r}, and {path} is no checkpoint in Megatron-Core's torch_dist format.",
            where=str(file),
            fix="name the directory of the checkpoint itself (iter_0001000)",
        )
    return path


def wrong(path: Path, what: str) -> CheckpointError:
    """Return the error for a file that cannot be used."""
    return CheckpointError(
        f"{path} {what}.", where=str(path), fix="copy the file again, or name another checkpoint"
    )


def _dicts(value: Any) -> Iterable[dict[str, Any]]:
    """Yield all dicts in a value, itself too."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _dicts(inner)
