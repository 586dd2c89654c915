"""What the engine says on rank 0, and how much of it: the JSON's `log_level`."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("launcher")


def set_level(name: str | None) -> None:
    """Set the level of the logger "launcher"; None leaves it as it is."""
    if name is None:
        return
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(name.upper())


def say(text: str) -> None:
    """Print a line at once, unless the logger's level asks for less than information."""
    if (logger.level or logging.INFO) <= logging.INFO:
        print(text, flush=True)
