"""Copies a checkpoint into launcher's own format, one tensor at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint import store
from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.source import SourceCheckpoint, there_already
from launcher.comm.plain import encode
from launcher.errors import CheckpointError
from launcher.tensor.split import Split


def copy(stored: SourceCheckpoint, out: Path) -> Path:
    """Copy a checkpoint, such as DeepSpeed's, into `out` in launcher's format; return its directory.

    Raises:
        CheckpointError: it is damaged, or `out` already has a checkpoint with its tag or is inside it.
    """
    if (out / stored.tag).exists():
        raise there_already(out / stored.tag)
    if out.resolve().is_relative_to(stored.path.resolve()):
        raise CheckpointError(
            f"The output directory {out} is inside the checkpoint to convert.",
            where=str(out),
            fix="choose another output directory",
        )
    tensors = {name: _lazily(stored, name) for name in stored.entries}
    meta = {key: encode(value) for key, value in stored.meta.items() if key != "writer"}
    meta |= {"imported_from": stored.meta["writer"]} if "writer" in stored.meta else {}
    store.save(out, stored.tag, tensors, meta)
    return out / stored.tag


def _lazily(stored: SourceCheckpoint, name: str) -> FlatSlice:
    """Return a tensor that is read only when it is written."""
    entry = stored.entries[name]
    place = Split.whole(tuple(entry.size)), 0, entry.size.numel()
    return FlatSlice.lazily(
        partial(_read, stored, name), *place, dtype=entry.properties.dtype, device=torch.device("cpu")
    )


def _read(stored: SourceCheckpoint, name: str) -> Tensor:
    return stored.tensor(name).view(-1)
