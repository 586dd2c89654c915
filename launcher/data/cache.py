"""A directory that is built once, however many processes ask for it, and is never seen half done."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def default_cache_dir() -> Path:
    """`$LAUNCHER_CACHE`, else `~/.cache/launcher`."""
    return Path(os.environ.get("LAUNCHER_CACHE") or Path.home() / ".cache" / "launcher")


def cache_key(*parts: object) -> str:
    """A name of 32 hex digits for everything a cached result depends on."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:32]


def build_once(final: Path, build: Callable[[Path], None]) -> Path:
    """Return `final`, after `build(temporary directory)` has filled it if nobody had.

    The first caller builds in a temporary directory beside `final` and renames it; the others wait on a
    lock that the kernel drops when its holder dies. What a killed builder left behind is removed by the next.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent / f".{final.name}.lock") as alone:
        if final.is_dir():
            return final
        if alone:
            for stale in final.parent.glob(f".{final.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        temporary = final.parent / f".{final.name}.tmp-{socket.gethostname()}-{os.getpid()}"
        try:
            temporary.mkdir()
            build(temporary)
            _sync(temporary)
            _rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock; False where the file system has none: then every process builds and one rename wins."""
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _sync(directory: Path) -> None:
    """Bring the files to the disk before the rename makes them visible."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _rename(temporary: Path, final: Path) -> None:
    try:
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():  # a process without a lock may have been first: its result is as good
            raise
