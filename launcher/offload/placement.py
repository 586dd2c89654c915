"""Placement of tensors: each is stored in the fastest tier with space left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.offload.offloaded import HostBuffers, OffloadedTensor
from launcher.offload.tier import Tier, memory


@dataclass(frozen=True)
class Placement:
    """Where a tensor is stored, and the device on which it is used.

    Args:
        device: the device of its memory while it is loaded.
        tier: where it is stored otherwise; None: always in memory.
    """

    device: torch.device
    tier: Tier | None = None


@dataclass(frozen=True)
class TierBudget:
    """A placement with limited space.

    Args:
        placement: the placement.
        size: its space in bytes; None: unlimited.
        share: maximum fraction of the bytes of all tensors.
    """

    placement: Placement
    size: int | None = None
    share: float = 1.0


def placed(sizes: Sequence[int], budgets: Sequence[TierBudget]) -> list[Placement]:
    """Return a placement for each tensor: the first budget with space left, else the last one, which is
    unlimited.

    Args:
        sizes: bytes of the tensors, in the order of assignment.
        budgets: fastest first.
    """
    total = sum(sizes)
    left = [min(total if r.size is None else r.size, int(total * r.share)) for r in budgets[:-1]]
    placements = []
    for size in sizes:
        for number, space in enumerate(left):
            if size <= space:
                left[number] -= size
                placements.append(budgets[number].placement)
                break
        else:
            placements.append(budgets[-1].placement)
    return placements


@dataclass
class Placements:
    """Where the shards of a run are stored.

    Args:
        device: the compute device of the module.
        parameters, optimizer: budgets for the shards of parameters, and for the optimizer's tensors: master
            weights, gradients and optimizer state. None: all stay on the device.
        buffers: memory for offloaded tensors.
        max_loaded_numel, max_loaded_units: maximum elements and units of parameters that are read before they are
            gathered.
        reads_ahead: read the next buffer while the optimizer steps the current one.
        states: number of fp32 optimizer states per element, estimated before they exist.
        cut: maximum elements of a flat buffer per rank; a buffer has at least one parameter.
    """

    device: torch.device
    parameters: Sequence[TierBudget] = ()
    optimizer: Sequence[TierBudget] = ()
    buffers: HostBuffers = field(default_factory=HostBuffers)
    max_loaded_numel: int = 0
    max_loaded_units: int = 0
    reads_ahead: bool = True
    states: int = 2
    cut: int = 2**63

    def of_parameters(self, sizes: Sequence[int]) -> list[Placement]:
        return placed(sizes, self.parameters or [TierBudget(Placement(self.device))])

    def of_optimizer(self, sizes: Sequence[int]) -> list[Placement]:
        return placed(sizes, self.optimizer or [TierBudget(Placement(self.device))])

    def reserve(self, sizes: Sequence[tuple[Placement, int]]) -> None:
        """Reserve space for tensors of these bytes before anything is written."""
        for tier in self.tiers:
            if wanted := sum(size for placement, size in sizes if placement.tier is tier):
                tier.reserve(wanted)

    def resting(self, key: str, numel: int, dtype: torch.dtype, placement: Placement) -> OffloadedTensor:
        """Return a zeroed tensor in a placement or, on a tier, one without values yet."""
        if placement.tier is not None:
            return OffloadedTensor(key, numel, dtype, self.buffers, placement.tier)
        return OffloadedTensor(
            key, numel, dtype, self.buffers, tensor=self._zeros(numel, dtype, placement.device)
        )

    def staying(self, tensor: Tensor) -> OffloadedTensor:
        """Wrap a tensor that is always in memory."""
        return OffloadedTensor("", tensor.numel(), tensor.dtype, self.buffers, tensor=tensor)

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device == self.device:
            return memory(numel, dtype, device).zero_()
        return self.buffers.make(numel, dtype).zero_()

    def close(self) -> None:
        """Delete all tensors stored in tiers."""
        self.buffers.wait_for_writes()
        for tier in self.tiers:
            tier.close()

    @property
    def one_memory(self) -> bool:
        """Return whether offloaded tensors are loaded into the same memory that is used for compute."""
        return bool(self.tiers) and self.device == torch.device("cpu")

    @property
    def tiers(self) -> list[Tier]:
        """Return each tier once."""
        found = [budget.placement.tier for budget in (*self.parameters, *self.optimizer)]
        return list({id(tier): tier for tier in found if tier is not None}.values())
