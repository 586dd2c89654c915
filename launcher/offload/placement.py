"""Placement of tensors: each goes to the fastest tier with space left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.offload.offloaded import HostBuffers, OffloadedTensor
from launcher.offload.tier import Tier, memory


@dataclass(frozen=True)
class Placement:
    """The place where something rests, and the device on which it is worked with.

    Args:
        device: that its memory is on while it has any.
        tier: where it is otherwise; None: always in this memory.
    """

    device: torch.device
    tier: Tier | None = None


@dataclass(frozen=True)
class TierBudget:
    """A placement with limited space.

    Args:
        placement: what it stands for.
        size: bytes; None: as many as there are.
        share: of the bytes of all that is placed.
    """

    placement: Placement
    size: int | None = None
    share: float = 1.0


def placed(sizes: Sequence[int], budgets: Sequence[TierBudget]) -> list[Placement]:
    """Return a placement for each tensor, in the first budget with space left; the last one takes all.

    Args:
        sizes: bytes, in the order in which they choose.
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
    """The places where the shards of a run rest.

    Args:
        device: what the module computes on.
        parameters, optimizer: budgets for the shards of parameters, and for what the optimizer works with: master
            weights, gradients and states. None: all stay on the device.
        buffers: memory for what comes and goes.
        ahead, units_ahead: elements and units of parameters that are read before they are gathered, at most.
        reads_ahead: the next buffer is read while the optimizer steps this one.
        states: fp32 states of the optimizer for each element, as far as is known before it has any.
        cut: elements of a flat buffer of one rank; one parameter at least.
    """

    device: torch.device
    parameters: Sequence[TierBudget] = ()
    optimizer: Sequence[TierBudget] = ()
    buffers: HostBuffers = field(default_factory=HostBuffers)
    ahead: int = 0
    units_ahead: int = 0
    reads_ahead: bool = True
    states: int = 2
    cut: int = 2**63

    def of_parameters(self, sizes: Sequence[int]) -> list[Placement]:
        return placed(sizes, self.parameters or [TierBudget(Placement(self.device))])

    def of_optimizer(self, sizes: Sequence[int]) -> list[Placement]:
        return placed(sizes, self.optimizer or [TierBudget(Placement(self.device))])

    def reserve(self, sizes: Sequence[tuple[Placement, int]]) -> None:
        """Reserve so many bytes, before anything is written."""
        for tier in self.tiers:
            if wanted := sum(size for placement, size in sizes if placement.tier is tier):
                tier.reserve(wanted)

    def resting(self, key: str, numel: int, dtype: torch.dtype, placement: Placement) -> OffloadedTensor:
        """Return a tensor of zeros in a placement, or one without values yet where it comes and goes."""
        if placement.tier is not None:
            return OffloadedTensor(key, numel, dtype, self.buffers, placement.tier)
        return OffloadedTensor(
            key, numel, dtype, self.buffers, tensor=self._zeros(numel, dtype, placement.device)
        )

    def staying(self, tensor: Tensor) -> OffloadedTensor:
        """Return a tensor that is here already, and stays."""
        return OffloadedTensor("", tensor.numel(), tensor.dtype, self.buffers, tensor=tensor)

    def _zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device == self.device:
            return memory(numel, dtype, device).zero_()
        return self.buffers.make(numel, dtype).zero_()

    def close(self) -> None:
        """Delete what rests in tiers."""
        self.buffers.wait_for_writes()
        for tier in self.tiers:
            tier.close()

    @property
    def one_memory(self) -> bool:
        """Return whether what comes from tiers and what is computed with lies in the same memory."""
        return bool(self.tiers) and self.device == torch.device("cpu")

    @property
    def tiers(self) -> list[Tier]:
        """Return each tier once."""
        found = [budget.placement.tier for budget in (*self.parameters, *self.optimizer)]
        return list({id(tier): tier for tier in found if tier is not None}.values())
