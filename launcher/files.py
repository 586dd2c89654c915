"""Small text files: non-blocking reads of files named by users, and atomic replacement of a run's files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from launcher.errors import ConfigError

LARGEST = 16 << 20  # bytes; for hand-written files


def read_small(
    path: Path, what: str, *, where: str, fix: str, errors: str = "strict", largest: int = LARGEST
) -> str:
    """Return the text of a file, without a byte-order mark.

    Args:
        what: a description of the file for error messages, such as "the config file".
        where, fix: passed to the error when the file cannot be read.
        errors: how invalid UTF-8 is handled, as in `open`.
        largest: maximum size in bytes.

    Raises:
        ConfigError: the file does not exist, is not a regular file (reading a pipe would block), is too
            large, or is not UTF-8.
    """
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{path} is a directory", where=where, fix=fix)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{what} {path} is a pipe or a device, not a file", where=where, fix=fix)
        if found.st_size > largest:
            size = f"{found.st_size >> 20:,} MiB" if found.st_size >> 20 else f"{found.st_size:,} bytes"
            raise ConfigError(f"{what} {path} has {size}, too large for such a file", where=where, fix=fix)
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist", where=where, fix=fix) from None
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start}"
        raise ConfigError(f"{what} {path} is not UTF-8 text: {reason}", where=where, fix=fix) from None
    except (OSError, ValueError) as error:
        reason = error.strerror or "" if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{what} {path} cannot be read: {reason}", where=where, fix=fix) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
