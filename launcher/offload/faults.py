"""Disk errors with the file, the key, the bytes, and a suggested fix."""

from __future__ import annotations

import errno
from pathlib import Path

from launcher.errors import OffloadError

_SPACE = "free space there, name a larger disk in nvme_path, or use more machines"
# errno -> (cause, fix)
_KNOWN: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", _SPACE),
    errno.EDQUOT: ("the quota is used up", _SPACE),
    errno.EFBIG: (
        "the file may not grow so large",
        "raise the limit (ulimit -f), or use a file system that takes it",
    ),
    errno.EROFS: (
        "the file system is read-only",
        "mount it for writing, or name another directory in nvme_path",
    ),
    errno.EACCES: (
        "writing is not allowed",
        "change its permissions, or name another directory in nvme_path",
    ),
    errno.EPERM: (
        "writing is not allowed",
        "change its permissions, or name another directory in nvme_path",
    ),
    errno.ENOENT: ("there is no such directory", "make it, or name one on the NVMe in nvme_path"),
    errno.ENOTDIR: ("this is not a directory", "name a directory on the NVMe in nvme_path"),
    errno.EIO: ("the disk reports an error", "look at the kernel's log (dmesg); the disk may be failing"),
    errno.EMFILE: ("too many files are open", "raise the limit (ulimit -n)"),
}


def as_offload_error(error: OSError, doing: str, path: Path | str) -> OffloadError:
    """Return the error for a failed system call.

    Args:
        doing: description of the operation, with key and bytes: `writing 4096 bytes of layer.3`.
    """
    number = error.errno or 0
    what, fix = _KNOWN.get(
        number, (error.strerror or str(error), "see the system's documentation of this error")
    )
    return OffloadError(
        f"{doing} failed: {what} ({errno.errorcode.get(number, number)})", where=str(path), fix=fix
    )


def no_room(needed: int, found: int, path: Path | str) -> OffloadError:
    """Return the error for a disk with less free space than offloading will need."""
    return OffloadError(
        f"the disk is too small for what is offloaded: {needed:,} bytes are needed, {found:,} are free",
        where=str(path),
        fix=_SPACE,
    )


def too_short(path: Path | str, doing: str, got: int) -> OffloadError:
    """Return the error for a file that ends before the data that was written to it."""
    return OffloadError(
        f"{doing} stopped after {got:,} bytes: the file was truncated after it was written",
        where=str(path),
        fix="keep other programs from the directory, and start again from the last checkpoint",
    )


def damaged(path: Path | str, doing: str) -> OffloadError:
    """Return the error for data that differs from what was written."""
    return OffloadError(
        f"{doing}: the checksum differs, so the file does not hold what was written",
        where=str(path),
        fix="keep other programs from the directory, look at the disk's health (dmesg, smartctl), and start again from"
        " the last checkpoint",
    )
