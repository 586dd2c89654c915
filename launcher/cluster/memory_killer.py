"""Detection of processes that the kernel killed because memory ran out."""

from __future__ import annotations

import os
import re
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
ALLOWANCE = "use less memory per rank, or give the job more"


def kills() -> int | None:
    """Return how many processes of this cgroup were killed for lack of memory; None if that is not
    counted."""
    for file in _counters():
        try:
            match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return None


def evidence(pid: int, kills_before: int | None) -> str | None:
    """Return the evidence that process `pid` was killed for lack of memory; None if there is none.

    Args:
        kills_before: `kills()` before the process started.
    """
    now = kills()
    if now is not None and kills_before is not None and now > kills_before:
        return "its cgroup reports it"
    return "the kernel's log reports it" if _in_kernel_log(pid) else None


def _counters() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            files.append(GROUPS / group.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(GROUPS / "memory" / group.lstrip("/") / "memory.oom_control")
    return [*files, GROUPS / "memory.events", GROUPS / "memory" / "memory.oom_control"]


def _in_kernel_log(pid: int) -> bool:
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        pattern = re.compile(rb"[Oo]ut of memory.*Killed process %d\b" % pid)
        while True:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # overwritten while being read: skip to the next
                continue
            if not record:
                return False
            if pattern.search(record):
                return True
    except OSError:
        return False
    finally:
        os.close(log)
