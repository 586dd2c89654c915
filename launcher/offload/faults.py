"""Disk errors with the file, the key, the bytes, and a suggested fix."""

from __future__ import annotations

import errno
from pathlib import Path

from launcher.errors import OffloadError

_SPACE = "free space there, set nvme_path to a larger disk, or use more machines"
# errno -> (cause, fix)
_KNOWN: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", _SPACE),
    errno.EDQUOT: ("the disk quota is exceeded", _SPACE),
    errno.EFBIG: (
        "the file would exceed the size limit",
        "raise the limit (ulimit -f), or use a file system that supports files of this size",
    ),
    errno.EROFS: (
        "the file system is read-only",
        "mount it for writing, or set nvme_path to another directory",
    ),
    errno.EACCES: (
        "permission denied",
        "change its permissions, or set nvme_path to another directory",
    ),
    errno.EPERM: (
        "permission denied",
        "change its permissions, or set nvme_path to another directory",
    ),
    errno.ENOENT: ("no such directory", "create it, or set nvme_path to a directory on the NVMe"),
    errno.ENOTDIR: ("not a directory", "set nvme_path to a directory on the NVMe"),
    errno.EIO: ("I/O error of the disk", "check the kernel log (dmesg); the disk may be failing"),
    errno.EMFILE: ("too many open files", "raise the limit (ulimit -n)"),
}


def as_offload_error(error: OSError, doing: str, path: Path | str) -> OffloadError:
    """Return the error for a failed system call.

    Args:
        doing: description of the operation, with key and bytes: `writing 4096 bytes of layer.3`.
    """
    number = error.errno or 0
    what, fix = _KNOWN.get(
        number, (error.strerror or str(error), "see the system's documentation of this error code")
    )
    return OffloadError(
        f"{doing} failed: {what} ({errno.errorcode.get(number, number)})", where=str(path), fix=fix
    )


def no_room(needed: int, found: int, path: Path | str) -> OffloadError:
    """Return the error for a disk with less free space than offloading will need."""
    return OffloadError(
        f"the disk is too small for the offloaded state: {needed:,} bytes are needed, {found:,} are free",
        where=str(path),
        fix=_SPACE,
    )


def too_short(path: Path | str, doing: str, got: int) -> OffloadError:
    """Return the error for a file that ends before the data that was written to it."""
    return OffloadError(
        f"{doing} stopped after {got:,} bytes: the file was truncated after it was written",
        where=str(path),
        fix="keep other programs out of the directory, and restart from the last checkpoint",
    )


def damaged(path: Path | str, doing: str) -> OffloadError:
    """Return the error for data that differs from what was written."""
    return OffloadError(
        f"{doing}: checksum mismatch: the file does not contain the data that was written",
        where=str(path),
        fix="keep other programs out of the directory, check the health of the disk (dmesg, smartctl), "
        "and restart from the last checkpoint",
    )
