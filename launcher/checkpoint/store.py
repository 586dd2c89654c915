"""Checkpoints of logical tensors in a directory: any topology writes one, any topology reads it.

Collective over `group`: every rank calls `save` and `load` with the same names. A rank that fails tells the
others, so all of them raise the same error and none waits for ever.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from launcher.checkpoint import tags
from launcher.checkpoint.reader import SafeReader, TensorLoadPlanner, incomplete, read_metadata, shapes_of
from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.tags import latest_tag, list_tags, prune
from launcher.errors import CheckpointError

__all__ = ["latest_tag", "list_tags", "load", "load_meta", "prune", "save"]

Tensors = Mapping[str, torch.Tensor | FlatSlice]
T = TypeVar("T")


def save(
    directory: str | Path,
    tag: str,
    tensors: Tensors,
    meta: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    latest: bool = True,
) -> None:
    """Write a checkpoint DIRECTORY/TAG and make it the latest one. Collective over `group`.

    Everything goes to DIRECTORY/.tmp-TAG and is synced; then rank 0 renames that and moves `latest`. A save
    that is killed or fails leaves the checkpoints that were there as they were. A tag that exists is
    replaced.

    Args:
        directory: the same one on every rank, on a file system that all ranks see.
        tag: name of the checkpoint: letters, digits, `_`, `-`, `.`.
        tensors: plain tensors (the same on every rank that has the name) and flat slices.
        meta: what JSON can hold: steps, learning rates, positions. Rank 0's counts.
        group: the ranks that save together; None is all of them. Without a process group: this process alone.
        latest: false leaves `latest` where it is.

    Raises:
        CheckpointError: on every rank, if any of them fails (disk full, no permission, slices that do not
            make up
            the tensor, ...).
    """
    path = Path(directory)
    ranks = _Ranks(group)
    text = ranks.together(lambda: _check_arguments(tag, meta))
    ranks.same("tag", tag)
    try:
        ranks.on_first(lambda: tags.start(path, tag))
        temporary = tags.temporary_path(path, tag)
        ranks.together(lambda: _check_visible(temporary))
        metadata = ranks.together(lambda: _write(temporary, tensors, ranks))
        ranks.together(lambda: _check_complete(metadata))
        ranks.on_first(lambda: _write_meta(temporary, text))
        ranks.on_first(lambda: tags.finish(path, tag, latest))
    except CheckpointError:
        if ranks.rank == 0:
            tags.discard(path, tag)
        raise


@overload
def load_meta(directory: str | Path, tag: str | None = None) -> tuple[str, dict[str, Any]]: ...
@overload
def load_meta(
    directory: str | Path, tag: str | None = None, *, missing_ok: Literal[False]
) -> tuple[str, dict[str, Any]]: ...
@overload
def load_meta(
    directory: str | Path, tag: str | None = None, *, missing_ok: bool
) -> tuple[str, dict[str, Any]] | None: ...
def load_meta(
    directory: str | Path, tag: str | None = None, *, missing_ok: bool = False
) -> tuple[str, dict[str, Any]] | None:
    """(tag, meta) of a checkpoint: of `tag`, or of the latest. Not collective.

    Args:
        missing_ok: where nothing was ever saved (there is no `latest`), return None.

    Raises:
        CheckpointError: there is none, it is incomplete, or its meta.json is corrupted.
    """
    path = Path(directory)
    chosen = tag if tag is not None else latest_tag(path)
    if chosen is None:
        if missing_ok:
            return None
        known = list_tags(path)
        raise CheckpointError(
            f"{path} has no checkpoint that is the latest: there is no file {tags.LATEST_FILE!r}.",
            where=str(path),
            fix=f"name the tag: {', '.join(known[-5:])}" if known else "check the directory",
        )
    where = tags.tag_path(path, chosen)
    content = tags.read_meta(where)
    _check_sizes(where, content["files"])
    return chosen, content["meta"]


def load(
    directory: str | Path,
    tag: str,
    tensors: Tensors,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Read the checkpoint DIRECTORY/TAG into `tensors`, in place. Collective over `group`.

    Flat slices get their elements whatever slicing was saved; a tensor of another dtype is converted. The
    checkpoint may hold more than is asked for. No code from the checkpoint is run.

    Args:
        strict: False leaves tensors that the checkpoint does not have as they are.

    Raises:
        CheckpointError: on every rank: names are missing, shapes differ, or a file is corrupted.
    """
    path = Path(directory)
    ranks = _Ranks(group)

    def prepare() -> tuple[Path, Metadata]:
        where = tags.tag_path(path, tag)
        _check_sizes(where, tags.read_meta(where)["files"])
        metadata = read_metadata(where)
        _check_fit(where, metadata, tensors, strict)
        return where, metadata

    where, metadata = ranks.together(prepare)
    ranks.together(
        lambda: _quietly(
            lambda: dcp.load(
                dict(tensors),
                storage_reader=SafeReader(where, metadata),
                planner=TensorLoadPlanner(flatten_state_dict=False, allow_partial_load=not strict),
                process_group=group,
                no_dist=ranks.alone,
            )
        )
    )


class _Writer(dcp.FileSystemWriter):
    """torch's writer with errors for people, and without this machine's path in the checkpoint."""

    def __init__(self, directory: Path, who: str) -> None:
        super().__init__(directory, sync_files=True, thread_count=1)
        self._who = who

    def storage_meta(self) -> StorageMeta | None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise CheckpointError(
                f"The checkpoint could not be written{self._who}: {_root_cause(error)}",
                where=str(self.path),
                fix="make room or save elsewhere; the checkpoints saved before are intact",
            ) from error


class _Ranks:
    """The ranks of a group, which fail together or not at all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise on all."""
        failure: str | None = None
        cause: BaseException | None = None
        try:
            result = work()
        except (Exception, CheckpointException) as error:
            cause, failure = error, _describe(error, None if self.alone else self.rank)
        failures = self._gather(failure)
        if not any(failures):
            return result
        if isinstance(cause, CheckpointError):
            raise cause
        raise CheckpointError(next(text for text in failures if text)) from cause

    def on_first(self, work: Callable[[], Any]) -> None:
        """Run `work` on rank 0 while the others wait; if it fails, raise on all."""
        self.together(lambda: work() if self.rank == 0 else None)

    def same(self, what: str, value: str) -> None:
        values = self._gather(value)
        if len(set(values)) > 1:
            raise CheckpointError(f"The ranks disagree about the {what}: {sorted(set(map(str, values)))}.")

    def _gather(self, value: str | None) -> list[str | None]:
        if self.alone:
            return [value]
        values: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values


def _root_cause(error: BaseException) -> BaseException:
    """The operating system's error behind it, if there is one: torch.save reports what follows from it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _describe(error: BaseException, rank: int | None) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        failed, (inner, _) = next(iter(error.failures.items()))
        return _describe(inner, None if rank is None else failed)
    if isinstance(error, CheckpointError):
        return str(error)
    on = "" if rank is None else f" on rank {rank}"
    if isinstance(error, OSError):
        return f"The checkpoint could not be written or read{on}: {error}"
    return f"The checkpoint failed{on}: {type(error).__name__}: {error}"


def _quietly(work: Callable[[], T]) -> T:
    with warnings.catch_warnings():
        # torch warns that one process alone saves or loads in one process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return work()


def _check_arguments(tag: str, meta: Mapping[str, Any]) -> str:
    tags.check_tag(tag)
    try:
        return json.dumps(dict(meta), allow_nan=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta cannot be written as JSON: {error}", fix="give plain values") from error


def _check_visible(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointError(
            f"{temporary} was made by rank 0 and cannot be seen here.",
            where=str(temporary.parent),
            fix="save to a file system that all nodes share",
        )


def _write(temporary: Path, tensors: Tensors, ranks: _Ranks) -> Metadata:
    writer = _Writer(temporary, "" if ranks.alone else f" on rank {ranks.rank}")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    return _quietly(
        lambda: dcp.save(
            dict(tensors),
            storage_writer=writer,
            planner=planner,
            process_group=ranks.group,
            no_dist=ranks.alone,
        )
    )


def _check_complete(metadata: Metadata) -> None:
    if names := incomplete(metadata):
        raise CheckpointError(
            f"The slices of {len(names)} tensors do not make up the whole: {', '.join(names[:5])}.",
            fix="every element has to be on one of the ranks that save",
        )


def _write_meta(temporary: Path, meta: str) -> None:
    files = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
    content = {
        "format": tags.FORMAT,
        "saved_at_ns": time.time_ns(),
        "torch": torch.__version__,
        "files": files,
        "meta": json.loads(meta),
    }
    tags.write_durably(temporary / tags.META_FILE, json.dumps(content, indent=1))


def _check_sizes(where: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        path = where / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise CheckpointError(
                f"{path} {state}.", where=str(path), fix="the checkpoint is incomplete; load another tag"
            )


def _check_fit(where: Path, metadata: Metadata, tensors: Tensors, strict: bool) -> None:
    stored = shapes_of(metadata)
    missing = [name for name in tensors if name not in stored] if strict else []
    wrong = [
        f"{name} is {tuple(tensor.shape)} here and {stored[name]} in the checkpoint"
        for name, tensor in tensors.items()
        if name in stored and tuple(tensor.shape) != stored[name]
    ]
    ragged = [name for name in incomplete(metadata) if name in tensors]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("of another shape", wrong), ("incomplete", ragged))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"The checkpoint does not fit the model: {'; '.join(problems)}.",
            where=str(where),
            fix="load it with the model that it was saved from",
        )
