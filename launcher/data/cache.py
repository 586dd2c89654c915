"""Cache directories that concurrent processes build once and never see incomplete or damaged."""

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
"""The file with the checksums (XXH3, 64 bits) of all other files of a directory; its first line is the
checksum of the rest."""
_PIECE = 1 << 20  # bytes read at a time, so that they are still in the CPU cache when hashed
logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return `$LAUNCHER_CACHE` if it is set, else `~/.cache/launcher`."""
    return Path(os.environ.get("LAUNCHER_CACHE") or Path.home() / ".cache" / "launcher")


def cache_key(*parts: object) -> str:
    """Return a name of 32 hex digits that identifies everything a cached result depends on."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:32]


def build_once(final: Path, build: Callable[[Path], None]) -> Path:
    """Return `final`, filled by `build(temporary directory)` if it does not exist or is damaged.

    Damage is logged. The first caller builds in a temporary directory next to `final` and renames it; the
    others wait on a lock that the kernel releases when its holder dies. What a killed builder left behind is
    removed by the next one. Every caller verifies the checksums of all files, which takes about 0.3 s per GB.
    """
    if final.is_dir() and fault(final) is None:
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent / f".{final.name}.lock") as alone:
        damaged = final.is_dir()
        if damaged:
            if (wrong := fault(final)) is None:
                return final
            logger.warning("%s: %s; rebuilding it", final, wrong)
        if alone:
            for stale in final.parent.glob(f".{final.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        temporary = final.parent / f".{final.name}.tmp-{socket.gethostname()}-{os.getpid()}"
        try:
            temporary.mkdir()
            build(temporary)
            _write_checksums(temporary)
            _sync(temporary)
            if damaged and fault(final) is not None:  # without locks, another process may have replaced it
                _replace(temporary, final)
            else:
                _rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def checksums(directory: Path) -> dict[str, str]:
    """Return the checksums of the files in a directory that `build_once` built, by their relative paths.

    Raises:
        ValueError: they cannot be read; the message is meant for users.
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
    """Return what is wrong with the files of a directory that `build_once` built; None if they are intact."""
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
    """Hold the lock; yield False if the file system has none, so that every process builds."""
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _sync(directory: Path) -> None:
    """Flush the files to disk before the rename makes them visible."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(temporary: Path, final: Path) -> None:
    """Replace a damaged directory; processes that have its files open can continue to read them."""
    doomed = temporary.with_name(f"{temporary.name}-damaged")
    os.rename(final, doomed)
    _rename(temporary, final)
    shutil.rmtree(doomed, ignore_errors=True)


def _rename(temporary: Path, final: Path) -> None:
    try:
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():  # a process without a lock may have been first: its result is equivalent
            raise
