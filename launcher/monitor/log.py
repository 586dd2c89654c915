"""The log of the engine on rank 0, and its level: the JSON's `log_level`."""

from __future__ import annotations

import logging

logger = logging.getLogger("launcher")


def set_level(name: str | None) -> None:
    """Set the level of the logger "launcher"; None leaves it as it is."""
    if name is None:
        return
    if not logger.hasHandlers():
        logger.addHandler(_Printer())
    logger.setLevel(name.upper())


class _Printer(logging.Handler):
    """Prints to what is stdout at that time, which a caller may have redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.name}: {record.getMessage()}", flush=True)


def say(text: str) -> None:
    """Print a line at once, unless the logger's level asks for less than information."""
    if (logger.level or logging.INFO) <= logging.INFO:
        print(text, flush=True)
