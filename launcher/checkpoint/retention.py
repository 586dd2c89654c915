"""Chooses the checkpoints that stay (`checkpoint.keep_last`, `checkpoint.keep_every`)."""

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
    """Delete old checkpoints; return their tags. To be called on one rank, when a newer one is complete.

    Only tags that a save without a name gets, global_step<N>, are deleted: those that somebody has named stay, and so
    does what `latest` names. What cannot be deleted is reported, and stays: training goes on.

    Args:
        keep_last: the newest so many stay.
        keep_every: those whose step it divides stay, too.
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
        logger.warning("old checkpoints in %s stay: they cannot be deleted: %s", directory, error)
    return gone


def _delete(directory: Path, tag: str) -> None:
    # Renamed first: half a checkpoint must not look like one. The next save clears up what a kill leaves here.
    doomed = directory / f"{TMP}{tag}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(tag_path(directory, tag), doomed)
    shutil.rmtree(doomed)
