"""Optimizers whose elementwise update depends on the whole parameter, of which a rank owns only a slice.

They step in two halves. `step` uses the gradients of this rank's slices to update elementwise state, the
moments. `finish` is a collective: the ranks exchange the information about whole parameters that they need,
and each updates its slices. `ShardedOptimizer` calls `step` for one flat buffer after the other, and `finish`
once for several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.zero.flat import ParamSlot


@dataclass(frozen=True)
class Stepped:
    """A parameter that got a gradient in this step, from the view of this rank. The list is the same on all
    ranks, in the same order.

    Args:
        slot: its name, shape and position in a flat buffer.
        group: its param group, not a copy.
        slice: the inner parameter [elements that this rank steps]; None if this rank owns no part of it.
    """

    slot: ParamSlot
    group: dict[str, Any]
    slice: Tensor | None


class WholeOptimizer(torch.optim.Optimizer):
    """Base class of these optimizers."""

    def finish(self, stepped: list[Stepped]) -> None:
        """Update the parameters after `step`. A collective: every rank calls it with the same parameters."""
        raise NotImplementedError


def held(slot: ParamSlot, rank: int) -> slice:
    """Return the range of the parameter's elements that the optimizer of `rank` steps; may be empty."""
    flat = slot.flat
    if not flat.shards_optim:
        return slice(0, slot.numel)
    size = flat.numel // flat.axis.degree
    start = min(max(rank * size - slot.offset, 0), slot.numel)
    return slice(start, max(start, min((rank + 1) * size - slot.offset, slot.numel)))
