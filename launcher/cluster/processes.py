"""Ending every process of a run, however deep in the tree it is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CHECK_S = 0.02
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL, where nobody has said it."""


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent, a rank, has died: none is lost sight of (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to those that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(except_for: Iterable[int] = ()) -> list[psutil.Process]:
    """Return all living processes below this one, without the trees of `except_for` (process ids)."""
    spared = set(except_for)
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spared:
            continue
        found.append(child)
        try:
            found += child.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return [process for process in found if _lives(process)]


def end_descendants(
    grace_s: float, except_for: Iterable[int] = (), hurry: Callable[[], bool] | None = None
) -> None:
    """Send SIGTERM to every process below this one, wait `grace_s` seconds or until `hurry`, then SIGKILL until none is
    left."""
    spared = list(except_for)
    remaining = descendants(spared)
    for process in remaining:
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while remaining and time.monotonic() < deadline and not (hurry is not None and hurry()):
        time.sleep(CHECK_S)
        remaining = descendants(spared)
    # A process stuck in the kernel cannot be killed at all; it must not hold the launcher for ever.
    deadline = time.monotonic() + 2
    while remaining and time.monotonic() < deadline:
        for process in remaining:
            _send(process, signal.SIGKILL)
        time.sleep(CHECK_S)
        remaining = descendants(spared)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
