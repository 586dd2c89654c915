"""Memory of this process: on the accelerator what its allocator gave out, on a CPU what the system counts."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch


_EARLIER: dict[str, int] = {}  # by device: the peak before it was looked for anew


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Return most bytes that this process ever held on `device`.

    CUDA: the most that tensors took together (`torch.cuda.max_memory_allocated`). CPU: the peak resident set
    (VmHWM), the Python interpreter and its libraries included.
    """
    return max(_peak_bytes(device), _EARLIER.get(str(device), 0))


def _peak_bytes(device: torch.device | str) -> int:
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _restart_peak(device: torch.device | str) -> None:
    """Begin anew to look for the peak. A CPU's system can do that on Linux, where it does not forbid it; elsewhere the
    peak stays that of the whole run."""
    _EARLIER[str(device)] = peak_memory_bytes(device)
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class StepMemory:
    """Measures what one step adds to the memory of this process: the third, when all is there that stays (states of the
    optimizer, the order in which parameters are gathered).

    Attributes:
        step_bytes: the most in that step, beyond what lay there before it; None: it was not taken yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._left = device, 2
        self.step_bytes: int | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Take a step inside."""
        self._left -= 1
        if self._left != -1:
            yield
            return
        trim_malloc()
        before = current_memory_bytes(self._device)
        _restart_peak(self._device)
        yield
        self.step_bytes = _peak_bytes(self._device) - before


def current_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Return the bytes that this process holds on `device` now: allocated by tensors (CUDA), or resident (CPU)."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def free_host_memory() -> int:
    """Return the bytes of host memory that can still be had: of the machine, or of this process's cgroup."""
    free = int(psutil.virtual_memory().available)
    for directory, limit, used, cached in _CGROUPS:
        try:
            most, taken = (int((directory / file).read_text()) for file in (limit, used))
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # not there, or "max"
            continue
        # Pages of files that nobody has used for a while are given up for whoever needs memory.
        free = min(free, max(0, most - taken + int(stat.get(cached, 0))))
    return free


_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def trim_malloc() -> None:
    """Have malloc give freed memory back to the system, which it keeps for later where that lies between blocks in use.
    Nothing happens where the C library is not glibc."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _status_bytes(key: str) -> int | None:
    """Return a size from /proc/self/status in bytes; None where the system has no such line."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


class MemoryBreakdown:
    """Memory after each phase of a step (`memory_breakdown`), as lines for people.

    Args:
        device: CUDA: bytes that tensors take, and the most they took so far. CPU: the resident set and its peak.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._after: dict[str, int] = {}

    def mark(self, phase: str) -> None:
        """Note that `phase` has ended; of several microbatches the last counts."""
        self._after[phase] = current_memory_bytes(self._device)

    def lines(self, held: dict[str, int]) -> list[str]:
        """Return what was marked, and what is held between steps.

        Args:
            held: what (parameters, gradients, ...) -> bytes.
        """
        kind = "allocated" if str(self._device).startswith("cuda") else "resident"
        marks = [f"after {phase} {_mib(count)}" for phase, count in self._after.items()]
        marks.append(f"peak {_mib(peak_memory_bytes(self._device))}")
        parts = [f"{what} {_mib(count)}" for what, count in held.items()]
        return [f"memory {kind}: " + " | ".join(marks), "memory held by ZeRO: " + " | ".join(parts)]


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
