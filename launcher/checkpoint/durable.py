"""Files that are on the disk before anybody is told that they are.

The disk writes while more of a file is made. Linux alone would begin when a tenth of the memory is dirty, and fsync
would then wait for all of it.
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
"""Bytes after which the disk is told to go on."""


class DurableFile(io.BufferedWriter):
    """A file, written from its beginning to its end; `finish` returns when the disk has it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="fdatasync")
        self._under_way: Future[None] | None = None
        self._waiting = 0  # bytes that the disk was not told of

    def write(self, content: Any) -> int:
        count = super().write(content)
        self._waiting += count
        if self._waiting >= _AT_ONCE and (self._under_way is None or self._under_way.done()):
            self._settle()
            self._waiting = 0
            self._under_way = self._disk.submit(os.fdatasync, self.fileno())
        return count

    def finish(self) -> None:
        """Wait until the disk has everything.

        Raises:
            OSError: it could not write.
        """
        self.flush()
        self._settle()
        os.fsync(self.fileno())

    def close(self) -> None:
        self._disk.shutdown()  # the descriptor is in use until then
        super().close()

    def _settle(self) -> None:
        # The kernel tells of an error once, so each answer counts.
        if self._under_way is not None:
            self._under_way.result()


def write_durably(path: Path, text: str) -> None:
    """Write a file so that after a crash it has the old or the new content, never a part."""
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
    """Return a place beside `path` for this process alone: several may write one file. What ended ones left is
    removed."""
    mine = f".{path.name}.{socket.gethostname()}."
    with contextlib.suppress(OSError):
        for other in path.parent.glob(f"{mine}*.tmp"):
            pid = other.name.removeprefix(mine).removesuffix(".tmp")
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                other.unlink(missing_ok=True)
    return path.with_name(f"{mine}{os.getpid()}.tmp")


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Give a place to write, which becomes `path` when all went well."""
    place = temporary_path(path)
    try:
        yield place
        os.replace(place, path)
    finally:
        place.unlink(missing_ok=True)
