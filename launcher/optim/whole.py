"""Optimizers whose update of an element depends on the whole parameter, of which a rank owns a slice only.

They step in two halves. `step` takes in the gradients of this rank's slices and changes what is elementwise, the
moments. `finish` is a collective: the ranks exchange what they need to know of whole parameters, and each changes its
slices. `ShardedOptimizer` calls `step` for one flat buffer after the other, and `finish` once for several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.zero.flat import ParamSlot


@dataclass(frozen=True)
class Stepped:
    """A parameter that got a gradient in this step, as this rank sees it. All ranks see the same ones in one order.

    Args:
        slot: its name, shape and place in a flat buffer.
        group: its param group, live.
        slice: [elements of it that this rank steps], the inner parameter; None: this rank owns nothing.
    """

    slot: ParamSlot
    group: dict[str, Any]
    slice: Tensor | None


class WholeOptimizer(torch.optim.Optimizer):
    """The base of such optimizers."""

    def finish(self, stepped: list[Stepped]) -> None:
        """Change the parameters after `step`. A collective: every rank calls it with the same parameters."""
        raise NotImplementedError


def held(slot: ParamSlot, rank: int) -> slice:
    """Return the elements of the parameter that the optimizer of `rank` steps; empty where it owns nothing of it."""
    flat = slot.flat
    if not flat.shards_optim:
        return slice(0, slot.numel)
    size = flat.numel // flat.axis.degree
    start = min(max(rank * size - slot.offset, 0), slot.numel)
    return slice(start, max(start, min((rank + 1) * size - slot.offset, slot.numel)))
