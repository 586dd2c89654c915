"""The engine's logger on rank 0 and its level (`log_level` in the JSON)."""

from __future__ import annotations

import logging

logger = logging.getLogger("launcher")


def set_level(name: str | None) -> None:
    """Set the level of the logger "launcher"; None leaves it unchanged."""
    if name is None:
        return
    if not logger.hasHandlers():
        logger.addHandler(_Printer())
    logger.setLevel(name.upper())


class _Printer(logging.Handler):
    """Prints to the current `sys.stdout`, which callers may redirect."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.name}: {record.getMessage()}", flush=True)


def say(text: str) -> None:
    """Print a line immediately, unless the logger's level is above INFO."""
    if (logger.level or logging.INFO) <= logging.INFO:
        print(text, flush=True)
