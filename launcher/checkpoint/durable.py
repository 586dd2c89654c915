"""Writes files that are on disk before they are reported as written.

The disk writes while the rest of a file is produced. By default, Linux would start writing when a tenth of
the memory is dirty, and fsync would then wait for all of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

_AT_ONCE = 1 << 26
"""Bytes to write before the next fdatasync is started in the background."""


class DurableFile(io.BufferedWriter):
    """A file that is written sequentially; `finish` returns when it is on disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="fdatasync")
        self._under_way: Future[None] | None = None
        self._waiting = 0  # bytes written since the last fdatasync was started

    def write(self, content: Any) -> int:
        count = super().write(content)
        self._waiting += count
        if self._waiting >= _AT_ONCE and (self._under_way is None or self._under_way.done()):
            self._settle()
            self._waiting = 0
            self._under_way = self._disk.submit(os.fdatasync, self.fileno())
        return count

    def finish(self) -> None:
        """Wait until the whole file is on disk.

        Raises:
            OSError: a write failed.
        """
        self.flush()
        self._settle()
        os.fsync(self.fileno())

    def close(self) -> None:
        self._disk.shutdown()  # a running fdatasync uses the descriptor
        super().close()

    def _settle(self) -> None:
        # The kernel reports a write error only once, so every result has to be checked.
        if self._under_way is not None:
            self._under_way.result()


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically: after a crash it has either the old or the new content."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_path(path: Path) -> Path:
    """Return a temporary path next to `path` that only this process uses, as several may write the same file.

    Temporary files of processes that have ended are removed.
    """
    mine = f".{path.name}.{socket.gethostname()}."
    with contextlib.suppress(OSError):
        for other in path.parent.glob(f"{mine}*.tmp"):
            pid = other.name.removeprefix(mine).removesuffix(".tmp")
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                other.unlink(missing_ok=True)
    return path.with_name(f"{mine}{os.getpid()}.tmp")


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which is renamed to `path` on success."""
    place = temporary_path(path)
    try:
        yield place
        os.replace(place, path)
    finally:
        place.unlink(missing_ok=True)
