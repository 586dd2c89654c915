"""Termination of all processes of a run, however deep in the process tree they are."""

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
"""Default number of seconds between SIGTERM and SIGKILL."""


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent, a rank, has died, to keep track of them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to the processes that are still alive."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(except_for: Iterable[int] = ()) -> list[psutil.Process]:
    """Return the living descendants found in one scan, without the trees of `except_for` (process ids).

    The system lists processes one after another. If a parent dies during the scan, a child may be missed: it
    was listed below a process that is gone. Call this again before concluding that none is left.
    """
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid", "status"]):
        children[process.info["ppid"]].append(process)
    spared, found = set(except_for), []
    below = children[os.getpid()]
    while below:
        # A zombie still counts as a parent: its children were listed before they were reparented.
        below = [process for process in below if process.pid not in spared]
        found += [process for process in below if process.info["status"] != psutil.STATUS_ZOMBIE]
        below = [child for process in below for child in children.pop(process.pid, ())]
    return found


def end_descendants(
    grace_s: float, except_for: Iterable[int] = (), hurry: Callable[[], bool] | None = None
) -> None:
    """Send SIGTERM to all descendants, wait `grace_s` seconds or until `hurry` returns True, then send
    SIGKILL until none is left."""
    spared = list(except_for)

    def look() -> list[psutil.Process]:
        # Scan twice before concluding that none is left: ranks may die with their agent during the first one.
        return descendants(spared) or descendants(spared)

    remaining = look()
    for process in remaining:
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while remaining and time.monotonic() < deadline and not (hurry is not None and hurry()):
        time.sleep(CHECK_S)
        remaining = look()
    # A process stuck in the kernel cannot be killed at all; it must not block the launcher forever.
    deadline = time.monotonic() + 2
    while remaining and time.monotonic() < deadline:
        for process in remaining:
            _send(process, signal.SIGKILL)
        time.sleep(CHECK_S)
        remaining = look()


def _send(process: psutil.Process, number: signal.Signals) -> None:
    # A user may not be allowed to end a setuid program that they started.
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process.send_signal(number)
