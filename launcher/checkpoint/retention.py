"""Deletes old checkpoints (`checkpoint.keep_last`, `checkpoint.keep_every`)."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from launcher.checkpoint.names import TMP
from launcher.checkpoint.tags import latest_tag, list_tags, tag_path
from launcher.errors import CheckpointError

logger = logging.getLogger("launcher")
_OF_STEP = re.compile(r"global_step(\d+)")


def delete_old(directory: Path, keep_last: int, keep_every: int | None = None) -> list[str]:
    """Delete old checkpoints; return their tags. Call it on one rank, after a newer checkpoint is complete.

    Only checkpoints with the default tag, global_step<N>, are deleted. The one that `latest` names is kept.
    If a checkpoint cannot be deleted, a warning is logged and training continues.

    Args:
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep checkpoints whose step is a multiple of this.
    """
    gone = []
    try:
        latest = latest_tag(directory)
        steps = {tag: int(match[1]) for tag in list_tags(directory) if (match := _OF_STEP.fullmatch(tag))}
        for tag in list(steps)[:-keep_last]:
            path = directory / tag
            if (
                tag == latest
                or path.is_symlink()
                or (keep_every is not None and steps[tag] % keep_every == 0)
            ):
                continue
            _delete(directory, tag)
            gone.append(tag)
    except (OSError, CheckpointError) as error:
        logger.warning("old checkpoints in %s could not be deleted: %s", directory, error)
    return gone


def _delete(directory: Path, tag: str) -> None:
    # Rename first: a half-deleted checkpoint must not look complete. The next save removes leftovers.
    doomed = directory / f"{TMP}{tag}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(tag_path(directory, tag), doomed)
    shutil.rmtree(doomed)
