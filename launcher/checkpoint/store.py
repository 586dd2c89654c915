"""Saves checkpoints of logical tensors to a directory and loads them, on any topology.

Collective over `group`: every rank calls `save` and `load` with the names that it has. If one rank fails, all
ranks raise the same error, so that none hangs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata

from launcher.checkpoint import formats, tags
from launcher.checkpoint.checksums import FileChecksum, check_sizes
from launcher.checkpoint.meta_file import read_meta, write_meta
from launcher.checkpoint.ranks import CollectiveErrors, Disagreement
from launcher.checkpoint.reader import (
    TensorLoadPlanner,
    check_fit,
    incomplete,
    quietly,
    read_metadata,
)
from launcher.checkpoint.save_checks import (
    TensorMap,
    check_separate,
    check_space,
    check_visible,
    shared_by_nodes,
)
from launcher.checkpoint.tags import latest_tag, list_tags
from launcher.checkpoint.writer import PartialPlanner, Stamps, write_files
from launcher.errors import CheckpointError, first_names

__all__ = [
    "find",
    "has_latest",
    "latest_tag",
    "list_tags",
    "load",
    "load_meta",
    "peek",
    "reading",
    "save",
]

logger = logging.getLogger("launcher")

T = TypeVar("T")


def save(
    directory: str | Path,
    tag: str,
    tensors: TensorMap,
    meta: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    latest: bool = True,
    *,
    node: dist.ProcessGroup | None = None,
    on_other_tags: Disagreement = "Fail",
) -> int:
    """Write a checkpoint DIRECTORY/TAG and make it the latest one. Collective over `group`.

    Everything is written to DIRECTORY/.tmp-TAG and synced; then rank 0 renames it and updates `latest`. A
    save that is killed or fails leaves earlier checkpoints intact. An existing checkpoint with the tag is
    replaced.

    Args:
        directory: the same on every rank, on a file system that all ranks see.
        tag: name of the checkpoint: letters, digits, `_`, `-`, `.`.
        tensors: plain tensors (the same on every rank that has the name) and flat slices.
        meta: JSON values: steps, learning rates, positions. Rank 0's is written.
        group: the ranks that save together; None: all ranks, or this process alone without torch.distributed.
        latest: False does not update `latest`.
        node: the ranks of this node, if each node has its own `directory`. Each directory then gets what its
            node's ranks pass, which may be only parts of the tensors.
        on_other_tags: what to do if ranks pass different tags; unless it is "Fail", rank 0's tag is used.

    Returns:
        Bytes of the files in this rank's directory, on the first of the ranks that share it; 0 on the others.

    Raises:
        CheckpointError: on every rank, if any of them fails (disk full, no permission, slices that do not
            make up the tensor, ...).
    """
    path = Path(directory)
    ranks = CollectiveErrors(group, node)
    text = ranks.together(lambda: _check_arguments(tag, meta))
    tag = ranks.agreed("tag", tag, on_other_tags)
    try:
        ranks.on_first(lambda: _start(path, tag, ranks))
        temporary = tags.temporary_path(path, tag)
        ranks.together(lambda: check_visible(temporary))
        if node is not None:
            check_separate(temporary, ranks)
        check_space(temporary, tensors, ranks)
        metadata, stamps = ranks.together(lambda: _write(temporary, tensors, ranks))
        if node is None:
            ranks.together(lambda: _check_complete(metadata))
        files = _stamps_of_all(stamps, ranks)
        written = ranks.on_first(lambda: _write_meta(temporary, files, json.loads(text), latest))
        ranks.on_first(lambda: tags.finish(path, tag, latest))
    except (CheckpointError, KeyboardInterrupt):
        if ranks.first:
            tags.discard(path, tag)
        raise
    return written or 0


def find(
    directory: str | Path,
    tag: str | None = None,
    *,
    missing_ok: bool = False,
    group: dist.ProcessGroup | None = None,
    node: dist.ProcessGroup | None = None,
) -> tuple[str, dict[str, Any]] | None:
    """Call `load_meta` on all ranks, and verify the checksums of the whole checkpoint.

    Collective over `group`: all ranks return the same, or all raise. Ranks of one directory split the work.
    """
    ranks = CollectiveErrors(group, node)
    found = ranks.together(lambda: _look(Path(directory), tag, missing_ok, tell=ranks.rank == 0))
    ranks.agreed("checkpoint to load", "none" if found is None else found[0])
    if found is None:
        return None
    ranks.together(lambda: formats.refuse_torchtitan(tags.tag_path(Path(directory), found[0])))
    _check_bytes(Path(directory), found[0], ranks)
    return found


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
    """Return (tag, meta) of the checkpoint `tag`, or of the latest one. Not collective.

    Args:
        missing_ok: return None if nothing was ever saved (there is no `latest`).

    Raises:
        CheckpointError: the checkpoint does not exist, is incomplete, or its meta.json is corrupted.
    """
    return _look(Path(directory), tag, missing_ok, tell=True)


def peek(directory: Path, tag: str | None) -> dict[str, Any]:
    """Return the meta of a checkpoint that will be loaded, without checking its files. Not collective."""
    where = tags.path_to_load(directory, tag)
    if where is None:
        raise CheckpointError(f"{directory} has no checkpoint.", where=str(directory))
    formats.refuse_torchtitan(where)
    meta = formats.foreign_meta(where)
    return read_meta(where).meta if meta is None else meta


def has_latest(directory: Path) -> bool:
    """Return whether a directory has a latest checkpoint.

    A `latest` file that cannot be read counts; the error is raised on loading.
    """
    return (directory / tags.LATEST_FILE).exists() or tags.tag_to_load(directory)[0] is not None


def _look(path: Path, tag: str | None, missing_ok: bool, *, tell: bool) -> tuple[str, dict[str, Any]] | None:
    chosen, note = (tag, None) if tag is not None else tags.tag_to_load(path)
    if chosen is None:
        tags.refuse_foreign(path)
        if missing_ok:
            if tell:
                logger.warning("%s, so no checkpoint is loaded", _nothing_latest(path))
            return None
        known = tags.tags_there(path)
        below = sorted(file.parent.name for file in path.glob(f"*/{tags.LATEST_FILE}"))
        fix = f"pass one of its subdirectories: {tags.last_of(below)}" if below else "check the directory"
        raise CheckpointError(
            f"{path} has no file {tags.LATEST_FILE!r}, which names the latest checkpoint.",
            where=str(path),
            fix=f"pass a tag: {known}" if known else fix,
        )
    where = tags.tag_path(path, chosen)
    if (meta := formats.foreign_meta(where)) is not None:
        if tell and note:
            logger.warning(note)
        return chosen, meta
    content = read_meta(where)
    if content.tag not in (None, tags.tag_of(where)):
        raise CheckpointError(
            f"{where / tags.META_FILE} belongs to the checkpoint {content.tag!r}, but its directory is named "
            f"{tags.tag_of(where)!r}.",
            where=str(where),
            fix=f"if the directory was renamed or copied, rename it to {content.tag}; if only that file was "
            "copied there, restore the original",
        )
    check_sizes(where, content.files)
    if not content.checksums:
        old = f"{where} has no checksums: an older version wrote it. Damage to it may go unnoticed."
        note = old if note is None else f"{note} {old}"
    if tell and note:
        logger.warning(note)
    return chosen, content.meta


def _nothing_latest(path: Path) -> str:
    if not path.is_dir():
        return f"{path} does not exist"
    there = tags.tags_there(path)
    others = f" (but checkpoints that can be loaded by tag: {there})" if there else ""
    return f"{path} has no file `{tags.LATEST_FILE}`{others}"


def _check_bytes(path: Path, tag: str, ranks: CollectiveErrors) -> None:
    """Verify the checksums; ranks that share the directory split the work."""

    ranks.together(lambda: formats.check_bytes(tags.tag_path(path, tag), *ranks.share))


def load(
    directory: str | Path,
    tag: str,
    tensors: TensorMap,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    *,
    node: dist.ProcessGroup | None = None,
    compared: bool = False,
    local: bool = False,
) -> None:
    """Read the checkpoint DIRECTORY/TAG into `tensors`, in place. Collective over `group`, unless `local`.

    Flat slices are filled regardless of the slicing that was saved; dtypes are converted. The checkpoint may
    contain more tensors than requested. No code from the checkpoint is run.

    Args:
        strict: False leaves tensors that the checkpoint does not contain unchanged.
        node: the ranks of this node, if each node has its own `directory`.
        compared: `find` has just verified the checksums.
        local: only this process reads, even if there are process groups.

    Raises:
        CheckpointError: on every rank: names are missing, shapes differ, or a file is corrupted.
    """
    path = Path(directory)
    ranks = CollectiveErrors(group, node, alone=local)

    where = tags.tag_path(path, tag)

    def prepare() -> Metadata:
        metadata = read_metadata(where)
        check_fit(where, metadata, tensors, strict)
        return metadata

    if not compared:
        ranks.together(lambda: _look(path, tag, False, tell=ranks.rank == 0))
        _check_bytes(path, tag, ranks)
    metadata = ranks.together(prepare)
    try:
        _read(lambda: formats.reader_of(where, metadata), tensors, ranks, strict)
    finally:
        formats.close(where)


def reading(where: Path, metadata: Metadata) -> Callable[[TensorMap], None]:
    """Return a function that fills tensors from a verified checkpoint, in this process alone.

    It may be called for one tensor at a time: the metadata is not read again. Tensors that the checkpoint
    does not contain stay unchanged. It raises a CheckpointError if shapes differ, or a file is corrupted.
    """
    alone, reader = CollectiveErrors(None, alone=True), formats.reader_of(where, metadata)

    def read(tensors: TensorMap) -> None:
        check_fit(where, metadata, tensors, strict=False)
        _read(lambda: reader, tensors, alone, strict=False)

    return read


def _read(
    reader: Callable[[], StorageReader], tensors: TensorMap, ranks: CollectiveErrors, strict: bool
) -> None:
    ranks.together(
        lambda: quietly(
            lambda: dcp.load(
                dict(tensors),
                storage_reader=reader(),
                planner=TensorLoadPlanner(flatten_state_dict=False, allow_partial_load=not strict),
                process_group=ranks.sharing,
                no_dist=ranks.alone,
            )
        )
    )


def _check_arguments(tag: str, meta: Mapping[str, Any]) -> str:
    tags.check_tag(tag)
    try:
        return json.dumps(dict(meta), allow_nan=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"meta cannot be written as JSON: {error}", fix="pass only JSON-serializable values"
        ) from error


def _start(path: Path, tag: str, ranks: CollectiveErrors) -> None:
    try:
        tags.start(path, tag)
    except tags.WrittenByAnother as error:
        raise (error if ranks.node is None else shared_by_nodes(path)) from error


def _write(temporary: Path, tensors: TensorMap, ranks: CollectiveErrors) -> tuple[Metadata, Stamps]:
    """Write this rank's tensors; return the metadata, and the checksums of the files that it wrote."""
    kind = dcp.DefaultSavePlanner if ranks.node is None else PartialPlanner
    return write_files(temporary, tensors, ranks.sharing, None if ranks.alone else ranks.rank, kind)


def _check_complete(metadata: Metadata) -> None:
    if names := incomplete(metadata):
        raise CheckpointError(
            f"The slices of {len(names)} tensors do not cover all elements: {first_names(names)}.",
            fix="every element must be on one of the ranks that save",
        )


def _stamps_of_all(stamps: Stamps, ranks: CollectiveErrors) -> Stamps:
    """Return the checksums of all files in this rank's directory, in the order of the writing ranks."""
    every = ranks.of_sharing({name: stamp.write() for name, stamp in stamps.items()})
    return {name: FileChecksum.read(content) for files in every for name, content in files.items()}


def _write_meta(temporary: Path, files: Stamps, meta: dict[str, Any], latest: bool) -> int:
    """Write meta.json; return the total bytes of the other files."""
    there = {file.name: file.stat().st_size for file in temporary.iterdir()}
    if there != {name: stamp.size for name, stamp in files.items()}:
        raise CheckpointError(
            f"The files in {temporary} differ from what was written: {sorted(there.items())}.",
            where=str(temporary),
            fix="make sure that nothing else writes there, and save again",
        )
    tag = tags.tag_of(temporary)
    more = {"tag": tag, "saved_at_ns": time.time_ns(), "torch": torch.__version__, "latest": latest}
    write_meta(temporary, files, meta, more)
    return sum(there.values())
