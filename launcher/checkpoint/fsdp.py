"""Reads checkpoints that FSDP2 programs wrote with torch.distributed.checkpoint as if they were launcher's.

The file format is the same, only the names differ: `model`, and the optimizer's `state` and `param_groups`,
as returned by `torch.distributed.checkpoint.state_dict`, nested or flattened. accelerate, and the Trainer
with it, writes model and optimizer into two directories.
"""

from __future__ import annotations

import io
import logging
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from launcher.checkpoint.deepspeed.meta import OPTIONS, types_of
from launcher.checkpoint.deepspeed.unpickle import plain
from launcher.checkpoint.names import (
    DCP,
    META_FILE,
    METADATA_FILE,
    TORCHTITAN,
    are_torchtitan,
    fsdp_directories,
)
from launcher.checkpoint.place_in_schedule import place_in_schedule
from launcher.checkpoint.reader import overlap, read_chunk, read_stored
from launcher.comm.plain import encode
from launcher.errors import CheckpointError, first_names

logger = logging.getLogger("launcher")

_STEP = "scalar/step/"
_TITANS_STEP = ("train_state", "step")
"""torchtitan's step count, which the optimizer state contains, too."""
_MODEL, _STATE, _GROUPS = "model", "state", "param_groups"


@dataclass(frozen=True)
class _Part:
    """An entry of an optimizer: a state of a parameter, or an option of a param group.

    Args:
        root: path of the optimizer.
        whose: name of the parameter, or index of the group; flattened options are per parameter.
    """

    root: tuple[Any, ...]
    kind: str
    whose: Any
    key: str


@dataclass
class FsdpContent:
    """The content of a checkpoint, under launcher's names.

    Attributes:
        metadata: shapes, dtypes, and locations in the files.
        options: (root of an optimizer, group or parameter) -> its options.
        left: top-level keys that are not loaded.
    """

    directory: Path
    metadata: Metadata = field(default_factory=lambda: Metadata({}, storage_data={}))
    options: dict[tuple[Any, Any], dict[str, Any]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def take(self, directory: Path) -> None:
        """Add the content of one directory.

        Raises:
            CheckpointError: it is launcher's own without its meta.json, or a state is not a tensor.
        """
        stored = read_stored(directory)
        # torch writes planner_data when it flattens names; launcher's own checkpoints do not have it.
        if not stored.planner_data:
            raise _damaged(directory / META_FILE, "it is missing")
        paths = {key: tuple(stored.planner_data.get(key, (key,))) for key in stored.state_dict_metadata}
        parts = {key: part for key, path in paths.items() if (part := _part_of(path)) is not None}
        # A root without param groups is not an optimizer, but e.g. averaged weights or the data position.
        optimizers = {part.root for part in parts.values() if part.kind == _GROUPS}
        places = _places(stored)
        nested = any(path[0] == _MODEL and len(path) > 1 for path in paths.values())
        for key, path in paths.items():
            is_tensor = isinstance(stored.state_dict_metadata[key], TensorStorageMetadata)
            part = parts.get(key)
            if part is None or part.root not in optimizers:
                name = _weight(path, nested=nested) if is_tensor else None
                if name is None:
                    self.left |= {str(path[0])} if path != _TITANS_STEP or not optimizers else set()
                else:
                    self._put(directory, stored.state_dict_metadata[key], places[key], name)
            elif part.kind == _GROUPS:
                ((_, info),) = places[key]
                self.options.setdefault((part.root, part.whose), {})[part.key] = _value(directory, info)
            elif is_tensor:
                entry = stored.state_dict_metadata[key]
                self._put(directory, entry, places[key], _of_state(part, entry))
            else:
                raise _unread(
                    directory, f"the state {part.key!r} of {part.whose} is a Python number, not a tensor"
                )

    def _put(self, directory: Path, entry: Any, places: list[tuple[MetadataIndex, Any]], name: str) -> None:
        self.metadata.state_dict_metadata[name] = entry
        for index, info in places:
            path = str((directory / info.relative_path).relative_to(self.directory))
            self.metadata.storage_data[replace(index, fqn=name)] = replace(info, relative_path=path)

    def check(self) -> None:
        """Check that there are weights, that optimizer states belong to them, and that no file is too short.

        Raises:
            CheckpointError: a check failed.
        """
        names = self.metadata.state_dict_metadata
        if not any(name.startswith("model/") for name in names):
            raise _unread(
                self.directory, f"it has no weights under {_MODEL!r}, where FSDP2 programs store them"
            )
        self._check_states()
        of_states = {name.split("/", 2)[2] for name in names if not name.startswith("model/")}
        # torchtitan saves the weights of q, k and v separately, but their moments as one tensor.
        own = {name: {f"model/{name}", f"model/{name.replace('.wqkv.', '.wq.')}"} for name in of_states}
        if odd := sorted(name for name in of_states if not own[name] & names.keys()):
            raise _unread(
                self.directory,
                f"it has optimizer states for {', '.join(odd[:3])}, but no "
                f"{'weights with those names' if odd[1:] else 'weight with that name'}",
            )
        for relative, end in _ends(self.metadata.storage_data):
            path = self.directory / relative
            if not path.is_file() or path.stat().st_size < end:
                raise _damaged(path, "it is too short" if path.is_file() else "it is missing")

    def tell_stateless(self) -> None:
        """Warn about parameters without optimizer state if others have it: their state starts afresh."""
        names = self.metadata.state_dict_metadata
        kept = {name.split("/", 2)[2] for name in names if name.startswith(("optimizer/", "scalar/"))}
        members = {name for group in self._groups()[1] for name in group} if kept else set[str]()
        if lacking := sorted(members - kept):
            logger.warning(
                "%s has no state for %d of the parameters in the optimizer; their state is reset: %s",
                self.directory, len(lacking), first_names(lacking),
            )  # fmt: skip

    def _check_states(self) -> None:
        """Check that states are numeric, Adam's moments have a step count, and chunks do not overlap."""
        every = self.metadata.state_dict_metadata.items()
        entries = {name: entry for name, entry in every if isinstance(entry, TensorStorageMetadata)}
        states = {name: entry for name, entry in entries.items() if name.startswith("optimizer/")}
        if odd := [n for n, e in states.items() if n.startswith("optimizer/step/") or not _is_real(e)]:
            size, dtype = list(states[odd[0]].size), states[odd[0]].properties.dtype
            raise _unread(self.directory, f"{odd[0]} has the invalid shape {size} or dtype {dtype}")
        counted = {name.removeprefix(_STEP) for name in entries if name.startswith(_STEP)}
        moments = {name.split("/", 2)[2] for name in states if name.startswith("optimizer/exp_avg")}
        if lacking := sorted(moments - counted):
            raise _unread(self.directory, f"it has Adam moments for {lacking[0]}, but no step count")
        for name, entry in entries.items():
            if overlap(entry.chunks):
                raise _damaged(self.directory / METADATA_FILE, f"chunks of {name} overlap")

    def _steps(self) -> int:
        """Return the number of optimizer steps: the largest count of any parameter."""
        found = [0]
        for index, info in self.metadata.storage_data.items():
            if index.fqn.startswith(_STEP):
                count = _loaded(self.directory, info)
                if not (_is_real(count) and math.isfinite(count) and count >= 0):
                    raise _unread(
                        self.directory, f"the step count of {index.fqn.removeprefix(_STEP)} is {count}"
                    )
                found.append(int(count))
        return max(found)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Return the meta in the form of launcher's meta.json, without other counters and the schedule."""
        states = {
            name.split("/")[1] for name in self.metadata.state_dict_metadata if name.startswith("optimizer/")
        }
        (options, names), steps = self._groups(), self._steps()
        made = {
            "global_steps": steps, "global_samples": 0, "micro_steps": steps, "skipped_steps": 0,
            "loss_scale": {"dynamic": False, "scale": 1.0, "tolerance": 1, "step": 0, "last_overflow": -1},
            "scheduler": place_in_schedule(steps),
            "optimizer": {"type": types_of(frozenset(states), {}), "param_groups": options, "names": names}
            if options
            else None,
            "world_size": 1, "writer": TORCHTITAN if are_torchtitan(self.metadata.state_dict_metadata) else DCP,
            "config": {}, "model": None, "tied": {}, "client_state": {},
        }  # fmt: skip
        return {key: encode(value) for key, value in made.items()}

    def _groups(self) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """Return (options of the param groups, names of their parameters).

        Flattened checkpoints have options per parameter; parameters with equal options form a group.
        """
        options: list[dict[str, Any]] = []
        members: list[list[str]] = []
        for (_, whose), said in self.options.items():
            names = list(said["params"]) if "params" in said else [str(whose)]
            own = {key: said[key] for key in OPTIONS if key in said and plain(said[key])}
            if not isinstance(own.get("lr", 0.0), int | float) or not math.isfinite(own.get("lr", 0.0)):
                raise _unread(
                    self.directory, f"the learning rate of {names[0] if names else whose} is {own['lr']!r}"
                )
            if isinstance(whose, str) and own in options:
                members[options.index(own)] += names
            else:
                options.append(own)
                members.append(names)
        return options, members


def open_fsdp(directory: Path) -> FsdpContent:
    """Open a checkpoint; its tensors stay on disk.

    Raises:
        CheckpointError: a file is missing or damaged, or there are no weights.
    """
    files = [
        path for place in fsdp_directories(directory) for path in sorted(place.iterdir()) if path.is_file()
    ]
    return _opened(directory, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@lru_cache(maxsize=1)
def _opened(directory: Path, changed: object) -> FsdpContent:
    content = FsdpContent(directory)
    for place in fsdp_directories(directory):
        try:
            content.take(place)
        except (KeyError, AttributeError, TypeError, ValueError) as error:  # inconsistent names
            raise _damaged(place / METADATA_FILE, f"{type(error).__name__}: {error}") from error
    content.check()
    content.tell_stateless()
    if content.left:
        logger.warning(
            "%s: ignoring entries that launcher does not support: %s",
            directory,
            ", ".join(sorted(content.left)),
        )
    return content


def check_bytes(directory: Path, share: int = 0, shares: int = 1) -> None:
    """Verify torch.save's checksums of all tensors, or of share number `share` out of `shares`.

    Raises:
        CheckpointError: a tensor is damaged.
    """
    for info in list(open_fsdp(directory).metadata.storage_data.values())[share::shares]:
        path = directory / info.relative_path
        try:
            with path.open("rb") as file:
                read_chunk(file, info)
        except (OSError, ValueError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
            raise _damaged(path, str(error) or type(error).__name__) from error


def _part_of(path: tuple[Any, ...]) -> _Part | None:
    """Return the optimizer entry at a path; None if the path cannot belong to an optimizer."""
    if len(path) > 2 and path[-3] in (_STATE, _GROUPS):
        return _Part(path[:-3], path[-3], path[-2], str(path[-1]))
    kind, _, rest = str(path[-1]).partition(".")
    whose, _, key = rest.rpartition(".")
    return _Part(path[:-1], kind, whose, key) if kind in (_STATE, _GROUPS) and whose else None


def _weight(path: tuple[Any, ...], *, nested: bool) -> str | None:
    """Return launcher's name of a model tensor; None if the path belongs to something else."""
    if nested != (len(path) > 1) or (nested and path[0] != _MODEL):
        return None
    return f"model/{'.'.join(map(str, path[1:] if nested else path))}"


def _of_state(part: _Part, entry: Any) -> str:
    return f"{'optimizer' if len(entry.size) else 'scalar'}/{part.key}/{part.whose}"


def _places(stored: Metadata) -> dict[str, list[tuple[MetadataIndex, Any]]]:
    """Return the locations of all chunks, by key."""
    found: dict[str, list[tuple[MetadataIndex, Any]]] = {key: [] for key in stored.state_dict_metadata}
    for index, info in stored.storage_data.items():
        found[index.fqn].append((index, info))
    return found


_WHOLE = (torch.int32, torch.int64)


def _is_real(tensor: Any) -> bool:
    """Return whether a stored tensor is numeric: floating-point or, for counts, integer."""
    entry = getattr(tensor, "properties", tensor)
    return isinstance(entry, int | float) or entry.dtype.is_floating_point or entry.dtype in _WHOLE


def _value(directory: Path, info: Any) -> Any:
    """Return an option, converted from a tensor: compiled optimizers store the learning rate as a tensor."""
    value = _loaded(directory, info)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _loaded(directory: Path, info: Any) -> Any:
    path = directory / info.relative_path
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
    except Exception as error:  # a damaged pickle can raise any exception
        raise _damaged(path, str(error).partition("\n")[0] or type(error).__name__) from error


def _ends(places: Mapping[MetadataIndex, Any]) -> Iterator[tuple[str, int]]:
    ends: dict[str, int] = {}
    for info in places.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    yield from ends.items()


def _unread(directory: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} cannot be read: {why}.",
        where=str(directory),
        fix="save {'model': ..., 'optim': ...} as returned by torch.distributed.checkpoint.state_dict."
        "get_state_dict(), or start from the model in Hugging Face format",
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {why}.",
        where=str(path),
        fix="the file is missing, incomplete or damaged; copy it again, or load another checkpoint",
    )
