"""Runs a subcommand again whenever one of its files changes. Imports, most of its time, are paid once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.cli.output import EXIT_MISTAKE, print_error
from launcher.errors import LauncherError, printable

INTERVAL_S = 0.2

Stamp = tuple[int, int, int] | None


def watch(files: Sequence[Path], run: Callable[[], int]) -> int:
    """Call `run` now and after every change of a file, until Ctrl-C.

    Errors are printed, and the files are watched further: the next save may correct them.

    Returns:
        The exit code of the last call.
    """
    names = printable(", ".join(map(str, files)))
    code, seen = 0, None
    try:
        while True:
            stamps = [_stamp(file) for file in files]
            if stamps == seen:
                time.sleep(INTERVAL_S)
                continue
            seen, began = stamps, time.monotonic()
            code = _reported(run)
            gc.collect()  # `launch` disables automatic collection
            print(
                f"---- {time.monotonic() - began:.1f} s; waiting for changes of {names} (Ctrl-C ends) ----",
                flush=True,
            )
    except KeyboardInterrupt:
        print()
        return code


def _reported(run: Callable[[], int]) -> int:
    try:
        return run()
    except LauncherError as error:
        print_error(str(error))
        return EXIT_MISTAKE


def _stamp(file: Path) -> Stamp:
    """Return what changes with a file's content; None without a file. Editors replace files, so the inode counts."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
