"""Small files of text: those that users name are read whole and never waited for, those of a run are replaced whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from launcher.errors import ConfigError

LARGEST = 16 << 20  # bytes; of what people write by hand


def read_small(
    path: Path, what: str, *, where: str, fix: str, errors: str = "strict", largest: int = LARGEST
) -> str:
    """Return the text of a file, without a byte-order mark.

    Args:
        what: it is, for messages: "the config file".
        where, fix: of the error where it cannot be read.
        errors: what becomes of bytes that are no UTF-8, as `open` takes it.
        largest: bytes that it may have.

    Raises:
        ConfigError: it is not there, no regular file (a pipe would be waited for), too large, or no UTF-8.
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
    """Write a file that a reader sees whole or not at all, also where it was there before."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
