"""A directory of one rank of one job: locked while it is used, and removed by the next job when its owner crashed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.offload import faults

logger = logging.getLogger("launcher")
LOCK, DATA = "lock", "shards.bin"
PREFIX = "launcher-offload-"


class OwnDirectory:
    """A new directory under `parent` that no other job touches.

    It holds a lock for its life, which the kernel drops when the process dies, however it dies. A directory of this
    machine whose lock is free was left by a crash, and is removed first.

    Attributes:
        path: the directory.
        data: the file to be made in it.
        removed: bytes that were found of crashed jobs, and given back.
    """

    def __init__(self, parent: Path, rank: int) -> None:
        self._lock: int | None = None
        try:
            with _locked(parent / f".{PREFIX}lock"):  # nobody looks between the making and the locking
                self.removed = sum(_remove_stale(parent))
                self.path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}rank{rank}-", dir=parent))
                self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise faults.told(error, "making a directory for offloaded shards", parent) from error
        self.data = self.path / DATA
        if self.removed:
            logger.warning("%s: removed %s bytes that crashed jobs left", parent, f"{self.removed:,}")

    def close(self) -> None:
        """Remove the directory. A second call does nothing."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def _prefix() -> str:
    return f"{PREFIX}{socket.gethostname()}-"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> Iterator[int]:
    """Remove what crashed jobs of this machine left; yields the bytes of each. What another machine made is left
    alone, as its locks may not be seen here, and told."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its owner is removing it
            if not path.is_dir() or not _is_free(path / LOCK):
                continue
            size = (path / DATA).stat().st_size if (path / DATA).exists() else 0
            if path.name.startswith(_prefix()):
                _remove(path)
                yield size
            else:
                logger.warning(
                    "%s: %s bytes of another machine's job; remove it if that has ended", path, f"{size:,}"
                )


def _is_free(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # crashed before it was made, or while all was removed
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(path: Path) -> None:
    """Only what was made here: the files by name, and the directory when nothing else is in it."""
    for name in (DATA, LOCK):
        (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()
