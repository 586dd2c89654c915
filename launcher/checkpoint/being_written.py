"""Locks temporary directories while a process writes them, so that concurrent saves do not interfere.

The kernel releases a lock when its process ends, however it ends. On file systems without locks on
directories (NFS), no directory counts as being written.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: dict[Path, int | None] = {}
"""Temporary directory that this process writes -> descriptor that holds its lock; None: no lock support."""


def hold(directory: Path) -> None:
    """Mark a directory as being written by this process, until `let_go`."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        _held[directory] = None
    else:
        _held[directory] = handle


def let_go(directory: Path) -> bool:
    """Unmark a directory; return whether this process had marked it."""
    if directory not in _held:
        return False
    if (handle := _held.pop(directory)) is not None:
        os.close(handle)
    return True


def is_being_written(directory: Path) -> bool:
    """Return whether another process, or a save of this one, is writing a directory."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:  # it has just been renamed
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
    """Close the inherited locks in a forked child, which does not write: they would outlive the parent's."""
    for handle in _held.values():
        if handle is not None:
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
