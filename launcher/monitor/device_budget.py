"""The memory of a device that is available to tensors: the device's total less overheads.

    context     CUDA context with loaded kernels, which the allocator does not count
    group       NCCL buffers per process group, also outside the allocator
    reserve     allocator rounding and fragmentation, and library workspaces: a share of the device

The figures are published ones; `devices.json` lists them with their sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import ConfigError
from launcher.monitor.devices import Device, defaults, device
from launcher.sizes import bytes_of, in_words

RESERVE = 0.06


@dataclass(frozen=True)
class DeviceBudget:
    """A device's memory and its overheads, in bytes except for `reserve`.

    Args:
        memory: memory visible to a program.
        context: CUDA context.
        group: buffers of each process group.
        reserve: share of `memory` to leave free.
        attention: the device's attention kernels; see `Device`.
    """

    memory: float
    context: float = 0.0
    group: float = 0.0
    reserve: float = 0.0
    attention: tuple[str, ...] = ()

    def usable(self, degrees: Sequence[int] = ()) -> int:
        """Return the bytes available to tensors.

        Args:
            degrees: degrees of the mesh axes. Each axis has a process group; with several axes, the world has
                one as well.
        """
        return max(0, int(self.memory * (1 - self.reserve) - self.context - self.group * _groups(degrees)))

    def in_words(self, degrees: Sequence[int] = ()) -> str:
        """Return "73.07 GiB (79.00 GiB less CUDA context 0.52 GiB, NCCL 1 x 0.67 GiB, a reserve of 6%)"."""
        taken = [f"CUDA context {in_words(self.context)}"] if self.context else []
        number = _groups(degrees)
        if number and self.group:
            taken.append(f"NCCL {number} x {in_words(self.group)}")
        if self.reserve:
            taken.append(f"a reserve of {100 * self.reserve:.3g}%")
        beside = f" ({in_words(self.memory)} less {', '.join(taken)})" if taken else ""
        return f"{in_words(self.usable(degrees))}{beside}"


def budget_of(gpu: str, reserve: float = RESERVE) -> DeviceBudget:
    """Return the budget of a device, given by its name, the file of its measured row, or its memory.

    Raises:
        ConfigError: `gpu` is none of these.
    """
    if not gpu.strip()[:1].isdigit():
        return budget_for(device(gpu), reserve)
    shares = defaults()
    try:
        memory = bytes_of(gpu)
    except ValueError as error:
        raise ConfigError(str(error), where="--gpu") from None
    context, group = shares["context_mib"] * 2**20, shares["group_mib"] * 2**20
    return DeviceBudget(memory, context, group, reserve, tuple(shares["attention"]))


def budget_for(known: Device, reserve: float = RESERVE, memory: float | None = None) -> DeviceBudget:
    """Return the budget of a known device.

    Args:
        memory: bytes of memory, if it differs from the table.
    """
    given = known.memory if memory is None else memory
    return DeviceBudget(given, known.context, known.group, reserve, known.attention)


def _groups(degrees: Sequence[int]) -> int:
    own = sum(degree > 1 for degree in degrees)
    return own + (own > 1) if math.prod(degrees) > 1 else 0
