"""A private scratch directory of one process; the user's next run removes those of killed processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
UNFINISHED_S = 3600.0
"""Seconds after which a directory without its final name counts as abandoned by a killed process."""


class Scratch:
    """A new directory under `parent`, which other users and jobs may use as well.

    The process holds a lock on the directory for its lifetime; the kernel releases it when the process dies
    for any reason. A directory of the same user and machine whose lock is free was left by a killed process,
    and is removed first. Files of other users are never opened.

    Args:
        prefix: the common prefix of all directories of this kind.
        name: the name of this directory, without a dash.

    Attributes:
        path: the directory.
        removed: bytes freed by removing the directories of killed processes.
        foreign: directories created by another machine, whose locks may not be visible from this one.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self, parent: Path, prefix: str, name: str) -> None:
        self._lock: int | None = None
        self.foreign: list[Path] = []
        self.removed = sum(self._remove_stale(parent, prefix))
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        self.path = parent / f"{prefix}{socket.gethostname()}-{name}-{new.name.removeprefix(f'.{prefix}')}"
        self._lock = os.open(new / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.path)  # locked before other processes can find it

    def close(self) -> None:
        """Remove the directory. A second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _remove_stale(self, parent: Path, prefix: str) -> Iterator[int]:
        """Remove the directories of killed processes; yield the size of each in bytes."""
        for path in parent.glob(f"{prefix}*-*-*"):
            with contextlib.suppress(FileNotFoundError):  # its owner or another job is removing it
                if not _is_ours(path):
                    continue
                if path.name.rsplit("-", 2)[0] != prefix + socket.gethostname():
                    self.foreign.append(path)
                    continue
                with _free_lock(path) as is_free:
                    if is_free:
                        size = size_of(path)
                        shutil.rmtree(path, ignore_errors=True)
                        yield size
        for path in parent.glob(f".{prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                if _is_ours(path) and time.time() - path.stat().st_mtime > UNFINISHED_S:
                    shutil.rmtree(path, ignore_errors=True)


def size_of(directory: Path) -> int:
    """Return the total size of the files in bytes."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def _is_ours(path: Path) -> bool:
    facts = path.lstat()
    return path.is_dir() and not path.is_symlink() and facts.st_uid == os.geteuid()


@contextlib.contextmanager
def _free_lock(path: Path) -> Iterator[bool]:
    """Yield whether the lock of a directory is free; if so, hold it inside the context."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its process was killed during removal
        yield path.exists()
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
