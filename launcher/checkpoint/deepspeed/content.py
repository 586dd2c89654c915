"""A checkpoint of DeepSpeed's under launcher's names: `model/<parameter>`, `optimizer/<state>/<parameter>`, and a meta.

See `engine/state.py` for the names, and for what the meta has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.checkpoint.deepspeed.files import find
from launcher.checkpoint.deepspeed.layout import StoredTensor, whole
from launcher.checkpoint.deepspeed.meta import meta_of
from launcher.checkpoint.deepspeed.opened import OpenedFiles
from launcher.checkpoint.deepspeed.sharded import frozen, sharded
from launcher.checkpoint.deepspeed.unsharded import unsharded
from launcher.errors import CheckpointError

LOOKED_AT = 8
"""Elements of each part of a parameter that are compared."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds.

    Attributes:
        stored: name -> logical tensor.
        meta: as in launcher's own meta.json.
    """

    stored: dict[str, StoredTensor]
    meta: dict[str, Any]


def open_content(directory: Path) -> Content:
    """Open a checkpoint (one tag) of DeepSpeed's. Its tensors stay on the disk.

    Raises:
        CheckpointError: a file is missing, damaged, or of another run; or it is of a kind that is not read.
    """
    files = find(directory).all
    return _opened(directory, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@lru_cache(maxsize=1)
def _opened(directory: Path, files: object) -> Content:
    """A load asks for the meta, the shapes and the tensors one after the other; `files` tells that nothing changed."""
    opened = OpenedFiles(find(directory))
    if opened.optimizers:
        stored, (states, groups) = sharded(opened), opened.base_state(0)
    else:
        stored, states, groups = unsharded(opened)
    stored |= frozen(opened)
    for name in opened.parameters:
        if f"model/{name}" not in stored and (opened.module[name].numel() or not opened.groups):
            stored[f"model/{name}"] = whole(opened.module[name])
    stored |= {f"buffer/{name}": whole(opened.module[name]) for name in opened.buffers}
    lacking = [name for name, entry in stored.items() if not entry.is_whole]
    if lacking:
        raise CheckpointError(
            f"{directory} has only parts of {len(lacking)} tensors: {', '.join(lacking[:5])}.",
            where=str(directory),
            fix="a file is of another run, or damaged; load another checkpoint (tag)",
        )
    _check_same_weights(opened, stored)
    return Content(stored, meta_of(opened.model, opened.optimizers.get(0), groups, states, opened.tied))


def _check_same_weights(opened: OpenedFiles, stored: dict[str, StoredTensor]) -> None:
    """Check that the model's file has the weights that the optimizer's files have: they are of one save, and of the
    ranks that their names say. At stage 3 the model's files have no weights, so nothing can be compared.

    A few elements of each part are looked at, so that the files are not read whole.
    """
    for name in opened.parameters:
        tensor, entry = opened.module[name], stored.get(f"model/{name}")
        if entry is None or tuple(tensor.shape) != entry.shape:
            continue
        for part in entry.parts:
            box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            ours, theirs = (
                x.reshape(-1)[:: max(1, x.numel() // LOOKED_AT)] for x in (part.data, tensor[box])
            )
            if not ours.to(theirs.dtype).equal(theirs):
                raise CheckpointError(
                    f"{opened.files.model[0]} has other weights of {name} than the files of the optimizer.",
                    where=str(opened.files.directory),
                    fix="files of two saves or of two ranks have been mixed up; copy all of them again",
                )


close_content = _opened.cache_clear
