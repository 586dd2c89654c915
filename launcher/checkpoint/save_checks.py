"""Checks before a save: free disk space, and whether the nodes share the directory as they should."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from launcher.checkpoint.ranks import CollectiveErrors
from launcher.checkpoint.slices import FlatSlice
from launcher.errors import CheckpointError

TensorMap = Mapping[str, torch.Tensor | FlatSlice]


def shared_by_nodes(directory: Path) -> CheckpointError:
    """Return the error for a directory that several nodes share but should not."""
    return CheckpointError(
        f"{directory} is shared by several nodes.",
        where="checkpoint.use_node_local_storage",
        fix="save to a directory on each node's local disk, or set it to false, so that all nodes save to one "
        "directory",
    )


def written_bytes(tensors: TensorMap) -> int:
    """Return the bytes that this rank writes for flat slices; other tensors are small and not counted."""
    return sum(tensor.written_bytes for tensor in tensors.values() if isinstance(tensor, FlatSlice))


def check_space(temporary: Path, tensors: TensorMap, ranks: CollectiveErrors) -> None:
    """Raise CheckpointError, before anything is written, if the disk is too full for the tensors.

    Only flat slices are counted. Collective.
    """
    needed = sum(ranks.of_sharing(written_bytes(tensors)))

    def look() -> None:
        free = shutil.disk_usage(temporary).free
        if needed > free:
            raise CheckpointError(
                f"The checkpoint needs {needed / 1e9:.2f} GB, but the disk has only {free / 1e9:.2f} GB free.",
                where=str(temporary.parent),
                fix="free some space or save elsewhere; earlier checkpoints are intact. checkpoint.keep_last deletes "
                "old ones when a newer one is complete",
            )

    ranks.on_first(look)


def check_visible(temporary: Path) -> None:
    """Raise CheckpointError if this node does not see the directory that rank 0 created."""
    if not temporary.is_dir():
        raise CheckpointError(
            f"{temporary} was created by rank 0 but is not visible on this node.",
            where=str(temporary.parent),
            fix="save to a file system that all nodes share",
        )


def check_separate(temporary: Path, ranks: CollectiveErrors) -> None:
    """Raise CheckpointError if nodes share a directory.

    Each node creates a marker file; in a shared directory it then finds other markers, or not its own.
    """
    mark = temporary / f".node-of-rank-{ranks.rank}"
    ranks.on_first(mark.touch)

    def look() -> None:
        if len(list(temporary.glob(".node-of-rank-*"))) != 1 or not mark.exists():
            raise shared_by_nodes(temporary.parent)

    ranks.on_first(look)
    ranks.on_first(mark.unlink)
