"""Memory of this process: allocated by torch's allocator on CUDA, resident set size on CPUs."""

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


_EARLIER: dict[str, int] = {}  # device -> peak before the last reset


def peak_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Return the peak bytes that this process has held on `device`.

    CUDA: peak of allocated tensors (`torch.cuda.max_memory_allocated`). CPU: peak resident set size (VmHWM),
    including the Python interpreter and its libraries.
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
    """Reset the peak. On CPUs this needs Linux and permission; otherwise the peak covers the whole run."""
    _EARLIER[str(device)] = peak_memory_bytes(device)
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class StepMemory:
    """Measures how much memory the third step of this process adds at its peak.

    By then, all permanent state exists (optimizer states, the order in which parameters are gathered).

    Attributes:
        step_bytes: peak of the third step minus the memory before it; None before the third step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._left = device, 2
        self.step_bytes: int | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step inside the context."""
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
    """Return the bytes that this process holds on `device`: allocated by tensors (CUDA) or resident (CPU)."""
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def free_host_memory() -> int:
    """Return the bytes of host memory still available on the machine and in this process's cgroup."""
    free = int(psutil.virtual_memory().available)
    for directory, limit, used, cached in _CGROUPS:
        try:
            most, taken = (int((directory / file).read_text()) for file in (limit, used))
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the file does not exist, or the limit is "max"
            continue
        # The kernel reclaims inactive page cache when memory is needed.
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
    """Release freed memory that glibc's malloc keeps between blocks in use; do nothing without glibc."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _status_bytes(key: str) -> int | None:
    """Return a size from /proc/self/status in bytes; None if there is no such line."""
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
    """Memory after each phase of a step (`memory_breakdown`), formatted as text.

    Args:
        device: CUDA reports current and peak bytes of tensors, CPU the resident set size and its peak.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._after: dict[str, int] = {}

    def mark(self, phase: str) -> None:
        """Record the memory at the end of `phase`; later microbatches overwrite earlier ones."""
        self._after[phase] = current_memory_bytes(self._device)

    def lines(self, held: dict[str, int]) -> list[str]:
        """Return the recorded memory and the memory held between steps as lines of text.

        Args:
            held: component (parameters, gradients, ...) -> bytes.
        """
        kind = "allocated" if str(self._device).startswith("cuda") else "resident"
        marks = [f"after {phase} {_mib(count)}" for phase, count in self._after.items()]
        marks.append(f"peak {_mib(peak_memory_bytes(self._device))}")
        parts = [f"{what} {_mib(count)}" for what, count in held.items()]
        return [f"memory {kind}: " + " | ".join(marks), "memory held by ZeRO: " + " | ".join(parts)]


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
