"""The memory of a device that the tensors of a run can take: the device's, less what lies beside them.

    context     of CUDA, with the kernels that a run loads; no allocator counts it
    group       buffers of NCCL for one group of ranks, outside the allocator, too
    reserve     rounding and fragmentation of the allocator, workspaces of libraries: a share of the device

The figures are published ones: `devices.json` has them with their sources.
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
    """A device's memory and who takes of it. All but `reserve` in bytes.

    Args:
        memory: what a program gets.
        context: of CUDA.
        group: of each group of ranks that exchange anything.
        reserve: share of `memory` that a plan leaves free.
        attention: the device's kernels; see `Device`.
    """

    memory: float
    context: float = 0.0
    group: float = 0.0
    reserve: float = 0.0
    attention: tuple[str, ...] = ()

    def usable(self, degrees: Sequence[int] = ()) -> int:
        """Return the bytes that tensors can take.

        Args:
            degrees: of the axes of the mesh; ranks of each have a group, and all ranks one where there are several.
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
    """Return the budget of a device, by its name, the file of its measured row, or the number of its bytes.

    Raises:
        ConfigError: it is none of these.
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
    """Return the budget of a device that is known.

    Args:
        memory: bytes, where it is not what the table says.
    """
    given = known.memory if memory is None else memory
    return DeviceBudget(given, known.context, known.group, reserve, known.attention)


def _groups(degrees: Sequence[int]) -> int:
    own = sum(degree > 1 for degree in degrees)
    return own + (own > 1) if math.prod(degrees) > 1 else 0
