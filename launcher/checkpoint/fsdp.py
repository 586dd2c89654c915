"""Checkpoints that programs of FSDP2 wrote with torch.distributed.checkpoint, read as if they were launcher's.

Both lie in the same files, so only names differ: there are `model` and the optimizer's `state` and `param_groups`, as
`torch.distributed.checkpoint.state_dict` gives them, nested or flattened. accelerate, and the Trainer with it, writes
them into two directories.
"""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from launcher.checkpoint.deepspeed.meta import OPTIONS, types_of
from launcher.checkpoint.deepspeed.unpickle import plain
from launcher.checkpoint.names import META_FILE, fsdp_directories
from launcher.checkpoint.reader import SafeReader, read_chunk, read_stored
from launcher.comm.plain import encode
from launcher.errors import CheckpointError

logger = logging.getLogger("launcher")

_MODEL, _STATE, _GROUPS = "model", "state", "param_groups"


@dataclass
class FsdpContent:
    """What a checkpoint has, under launcher's names.

    Attributes:
        metadata: shapes, dtypes, and where in which file everything is.
        options: number of a param group, or name of a parameter -> its options.
        left: what is not loaded.
        places: of Python values, by their paths.
    """

    directory: Path
    metadata: Metadata = field(default_factory=lambda: Metadata({}, storage_data={}))
    options: dict[Any, dict[str, Any]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def take(self, directory: Path) -> None:
        """Add what one directory has.

        Raises:
            CheckpointError: it is damaged, or one of launcher's own without its meta.json.
        """
        stored = read_stored(directory)
        if (
            not stored.planner_data
        ):  # torch writes it where it has flattened names, and launcher has none to flatten
            raise _damaged(directory / META_FILE, "it is missing")
        paths = {key: stored.planner_data.get(key, (key,)) for key in stored.state_dict_metadata}
        nested = any(path[0] == _MODEL and len(path) > 1 for path in paths.values())
        for key, entry in stored.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                name = _name(paths[key], entry, nested=nested)
                if name is None:
                    self.left.add(str(paths[key][0]))
                else:
                    self._put(directory, stored, key, name)
            elif (option := _option(paths[key])) is not None:
                group, what = option
                self.options.setdefault(group, {})[what] = self._value(directory, stored, key)
            else:
                self.left.add(str(paths[key][0]))

    def _put(self, directory: Path, stored: Metadata, key: str, name: str) -> None:
        self.metadata.state_dict_metadata[name] = stored.state_dict_metadata[key]
        for index, info in stored.storage_data.items():
            if index.fqn == key:
                path = str((directory / info.relative_path).relative_to(self.directory))
                self.metadata.storage_data[replace(index, fqn=name)] = replace(info, relative_path=path)

    def _value(self, directory: Path, stored: Metadata, key: str) -> Any:
        return _loaded(directory, stored.storage_data[MetadataIndex(key)])

    def steps(self) -> int:
        """Return the steps that were made."""
        places = self.metadata.storage_data.items()
        found = [
            int(_loaded(self.directory, info))
            for index, info in places
            if index.fqn.startswith("scalar/step/")
        ]
        return max(found, default=0)

    def meta(self) -> dict[str, Any]:
        """Return the meta as launcher's own meta.json has it. Counters and schedules are the program's own."""
        states = {
            name.split("/")[1] for name in self.metadata.state_dict_metadata if name.startswith("optimizer/")
        }
        options, names = self._groups()
        made = {
            "global_steps": self.steps(), "global_samples": 0, "micro_steps": self.steps(), "skipped_steps": 0,
            "loss_scale": {"dynamic": False, "scale": 1.0, "tolerance": 1, "step": 0, "last_overflow": -1},
            "scheduler": None,
            "optimizer": {"type": types_of(frozenset(states), {}), "param_groups": options, "names": names}
            if options
            else None,
            "world_size": 1, "writer": "torch.distributed.checkpoint", "config": {}, "model": None, "tied": {},
            "client_state": {},
        }  # fmt: skip
        return {key: encode(value) for key, value in made.items()}

    def _groups(self) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """Return (options of the param groups, names of their parameters). Flattened, each parameter has options."""
        names = {number: [str(number)] for number in self.options}
        names |= {number: list(said["params"]) for number, said in self.options.items() if "params" in said}
        options: list[dict[str, Any]] = []
        members: list[list[str]] = []
        for number, said in self.options.items():
            own = {key: said[key] for key in OPTIONS if key in said and plain(said[key])}
            if isinstance(number, str) and own in options:
                members[options.index(own)] += names[number]
            else:
                options.append(own)
                members.append(names[number])
        return options, members


def open_fsdp(directory: Path) -> FsdpContent:
    """Open a checkpoint; its tensors stay on the disk.

    Raises:
        CheckpointError: a file is missing or damaged, or it has no weights.
    """
    files = [
        path for place in fsdp_directories(directory) for path in sorted(place.iterdir()) if path.is_file()
    ]
    return _opened(directory, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@lru_cache(maxsize=1)
def _opened(directory: Path, changed: object) -> FsdpContent:
    content = FsdpContent(directory)
    for place in fsdp_directories(directory):
        content.take(place)
    if not any(name.startswith("model/") for name in content.metadata.state_dict_metadata):
        raise CheckpointError(
            f"{directory} has no weights under {_MODEL!r}, where programs of FSDP2 put them.",
            where=str(directory),
            fix="save the state dicts of torch.distributed.checkpoint.state_dict as {'model': ..., 'optim': ...}, or "
            "export the model in Hugging Face's format and start from that",
        )
    _check_sizes(content)
    if content.left:
        logger.warning("of %s this is not loaded: %s", directory, ", ".join(sorted(content.left)))
    return content


def check_bytes(directory: Path, share: int = 0, shares: int = 1) -> None:
    """Compare the bytes of the tensors, or of this share of them, with the checksums that torch.save wrote.

    Raises:
        CheckpointError: they differ.
    """
    for info in list(open_fsdp(directory).metadata.storage_data.values())[share::shares]:
        path = directory / info.relative_path
        try:
            with path.open("rb") as file:
                read_chunk(file, info)
        except (OSError, ValueError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
            raise _damaged(path, str(error)) from error


def reader_of(directory: Path) -> SafeReader:
    """Return what reads the tensors."""
    return SafeReader(directory, open_fsdp(directory).metadata)


def _name(path: tuple[Any, ...], entry: TensorStorageMetadata, *, nested: bool) -> str | None:
    """Return launcher's name of a tensor; None where it is none of a run's."""
    parts = [str(part) for part in path]
    if _STATE in parts[:-2]:
        at = parts.index(_STATE)
        return _of_state(".".join(parts[at + 1 : -1]), parts[-1], entry)
    if parts[-1].startswith(f"{_STATE}."):
        name, _, state = parts[-1].removeprefix(f"{_STATE}.").rpartition(".")
        return _of_state(name, state, entry)
    if not nested and len(parts) == 1:
        return f"model/{parts[0]}"
    return f"model/{'.'.join(parts[1:])}" if nested and parts[0] == _MODEL else None


def _of_state(name: str, state: str, entry: TensorStorageMetadata) -> str:
    return f"{'optimizer' if len(entry.size) else 'scalar'}/{state}/{name}"


def _option(path: tuple[Any, ...]) -> tuple[Any, str] | None:
    """Return (param group, or parameter; option) of a Python value; None where it is no option."""
    if _GROUPS in path[:-2]:
        return path[-2], str(path[-1])
    last = str(path[-1])
    if last.startswith(f"{_GROUPS}."):
        name, _, option = last.removeprefix(f"{_GROUPS}.").rpartition(".")
        return name, option
    return None


def _loaded(directory: Path, info: Any) -> Any:
    path = directory / info.relative_path
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
    except Exception as error:  # damaged pickles fail with anything
        raise _damaged(path, str(error).partition("\n")[0]) from error


def _check_sizes(content: FsdpContent) -> None:
    """Check that the files are as long as what is in them; the checksums of tensors are compared when they are read."""
    for relative, end in _ends(content.metadata.storage_data):
        path = content.directory / relative
        if not path.is_file() or path.stat().st_size < end:
            raise _damaged(path, "it is too short" if path.is_file() else "it is missing")


def _ends(places: Mapping[MetadataIndex, Any]) -> Iterator[tuple[str, int]]:
    ends: dict[str, int] = {}
    for info in places.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    yield from ends.items()


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {why}.",
        where=str(path),
        fix="the file is missing, incomplete or damaged; copy it again, or load another checkpoint",
    )
