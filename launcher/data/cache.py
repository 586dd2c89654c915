"""A directory that is built once, however many processes ask for it, and is never seen half done or damaged."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

CHECKSUMS = ".checksums"
"""Beside what was built: the checksums (XXH3, 64 bits) of all files, behind a line with their own."""
_PIECE = 1 << 20  # read at a time: what was read is still in the cache when it is hashed
logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return `$LAUNCHER_CACHE`, else `~/.cache/launcher`."""
    return Path(os.environ.get("LAUNCHER_CACHE") or Path.home() / ".cache" / "launcher")


def cache_key(*parts: object) -> str:
    """Return a name of 32 hex digits for everything a cached result depends on."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:32]


def build_once(final: Path, build: Callable[[Path], None]) -> Path:
    """Return `final`, after `build(temporary directory)` has filled it if nobody had, or its files are not those that
    were built: that is told.

    The first caller builds in a temporary directory beside `final` and renames it; the others wait on a
    lock that the kernel drops when its holder dies. What a killed builder left behind is removed by the next.
    Every caller reads all files once, which takes some 0.3 s a GB.
    """
    if final.is_dir() and fault(final) is None:
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent / f".{final.name}.lock") as alone:
        damaged = final.is_dir()
        if damaged:
            if (wrong := fault(final)) is None:
                return final
            logger.warning("%s: %s; making it again", final, wrong)
        if alone:
            for stale in final.parent.glob(f".{final.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        temporary = final.parent / f".{final.name}.tmp-{socket.gethostname()}-{os.getpid()}"
        try:
            temporary.mkdir()
            build(temporary)
            _write_checksums(temporary)
            _sync(temporary)
            if damaged and fault(final) is not None:  # still: without locks, another may have been first
                _replace(temporary, final)
            else:
                _rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def checksums(directory: Path) -> dict[str, str]:
    """Return the checksums of the files of a directory that `build_once` has built, by their paths in it.

    Raises:
        ValueError: none can be read, in words for people.
    """
    try:
        own, _, body = (directory / CHECKSUMS).read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        raise ValueError("it has no checksums") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"its checksums cannot be read: {error}") from None
    if own != xxhash.xxh3_64_hexdigest(body.encode()):
        raise ValueError("its checksums are damaged")
    found: dict[str, str] = json.loads(body)
    return found


def fault(directory: Path) -> str | None:
    """Return what is wrong with the files of a directory that `build_once` has built; None: they are as they were."""
    try:
        for name, wanted in checksums(directory).items():
            path = directory / name
            if not path.is_file():
                return f"{name} is missing"
            if _digest(path) != wanted:
                return f"{name} is damaged"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _write_checksums(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    body = json.dumps({path.relative_to(directory).as_posix(): _digest(path) for path in files}, indent=1)
    own = xxhash.xxh3_64_hexdigest(body.encode())
    (directory / CHECKSUMS).write_text(f"{own}\n{body}", encoding="utf-8")


def _digest(path: Path) -> str:
    hashed, piece = xxhash.xxh3_64(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            hashed.update(piece[:count])
    digest: str = hashed.hexdigest()
    return digest


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


def _replace(temporary: Path, final: Path) -> None:
    """Replace a damaged directory; who reads its files at this moment goes on with them."""
    doomed = temporary.with_name(f"{temporary.name}-damaged")
    os.rename(final, doomed)
    _rename(temporary, final)
    shutil.rmtree(doomed, ignore_errors=True)


def _rename(temporary: Path, final: Path) -> None:
    try:
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():  # a process without a lock may have been first: its result is as good
            raise
