"""Marks temporary directories that a living process is writing, so that two saves into one place do not collide.

The kernel lets go of a lock when its process ends, however it ends. Where a file system has no locks on directories
(NFS), nothing counts as being written.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: dict[Path, int | None] = {}
"""Temporary directory that this process writes -> the descriptor whose lock says so; None: there are no locks here."""


def hold(directory: Path) -> None:
    """Say that this process writes a directory, until `let_go`."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        _held[directory] = None
    else:
        _held[directory] = handle


def let_go(directory: Path) -> bool:
    """Say that this process writes a directory no more; return whether it did."""
    if directory not in _held:
        return False
    if (handle := _held.pop(directory)) is not None:
        os.close(handle)
    return True


def is_being_written(directory: Path) -> bool:
    """Return whether another process, or a save of this one, writes a directory."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:  # it has just been given its name
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _forget() -> None:
    """A child process does not write: its copy of a lock would outlive ours."""
    for handle in _held.values():
        if handle is not None:
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
