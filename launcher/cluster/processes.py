"""Ending every process of a run, however deep in the tree it is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
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
    """Return the living processes below this one that one look sees, without the trees of `except_for` (process ids).

    The system lists processes one after another. Where a parent dies during the look, a child may be missed: it was
    listed below a process that is gone. Call this again before you trust that nobody is left.
    """
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid", "status"]):
        children[process.info["ppid"]].append(process)
    spared, found = set(except_for), []
    below = children[os.getpid()]
    while below:
        # A process that has died is a parent still: its children were listed before they were handed on.
        below = [process for process in below if process.pid not in spared]
        found += [process for process in below if process.info["status"] != psutil.STATUS_ZOMBIE]
        below = [child for process in below for child in children.pop(process.pid, ())]
    return found


def end_descendants(
    grace_s: float, except_for: Iterable[int] = (), hurry: Callable[[], bool] | None = None
) -> None:
    """Send SIGTERM to every process below this one, wait `grace_s` seconds or until `hurry`, then SIGKILL until none is
    left."""
    spared = list(except_for)

    def look() -> list[psutil.Process]:
        # Twice before nobody is left: ranks die with their agent, and the first look may come at that moment.
        return descendants(spared) or descendants(spared)

    remaining = look()
    for process in remaining:
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while remaining and time.monotonic() < deadline and not (hurry is not None and hurry()):
        time.sleep(CHECK_S)
        remaining = look()
    # A process stuck in the kernel cannot be killed at all; it must not hold the launcher for ever.
    deadline = time.monotonic() + 2
    while remaining and time.monotonic() < deadline:
        for process in remaining:
            _send(process, signal.SIGKILL)
        time.sleep(CHECK_S)
        remaining = look()


def _send(process: psutil.Process, number: signal.Signals) -> None:
    # Its user may not end a setuid program.
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)
