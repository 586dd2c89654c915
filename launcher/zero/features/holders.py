"""Sums partial gradients of elements that several tp ranks or pipeline stages hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.comm import Axis, all_reduce
from launcher.tensor.split import DimSlice
from launcher.zero.norm import held_by_several
from launcher.zero.slot import ParamSlot

if TYPE_CHECKING:
    from launcher.zero.gradients import FlatGradient


def sum_over_holders(
    terms: Sequence[Tensor], parts: Sequence[DimSlice], tp: Axis, device: torch.device, tag: str
) -> list[Tensor]:
    """Return the fp32 sum of each term over the ranks that hold its part. One collective along tp, even
    without terms.

    A part that not all ranks hold has one row in the buffer for each group of holders; the other groups leave
    that row zero.
    """
    places, end = [], 0
    for term, part in zip(terms, parts, strict=True):
        places.append(slice(end + part.group * term.numel(), end + (part.group + 1) * term.numel()))
        end += tp.degree // part.holders * term.numel()
    sums = torch.zeros(max(1, end), device=device)
    rows = [sums[place] for place in places]
    if rows:
        torch._foreach_copy_(rows, list(terms))
    all_reduce(sums, tp, tag).wait()
    return rows


def sum_partial(gradients: Sequence[FlatGradient], tp: Axis, device: torch.device) -> None:
    """Sum partial gradients over their holders. One collective along tp, after the reduction over dp."""
    terms: list[Tensor] = []
    parts: list[DimSlice] = []
    for gradient in gradients:
        for span, part, _ in held_by_several(gradient.flat, gradient.flat.owned, partial_only=True):
            terms.append(gradient.owned[span])
            parts.append(part)
    if terms:
        torch._foreach_copy_(terms, sum_over_holders(terms, parts, tp, device, "root/partial"))


def sum_over_stages(gradients: Sequence[FlatGradient]) -> None:
    """Sum the gradients of parameters that several pipeline stages hold, after the reduction over dp. The
    buffers are identical on these stages, so each rank owns the same elements as its counterparts on the
    other stages."""
    for gradient in gradients:
        if (holders := gradient.flat.slots[0].holders).degree > 1:
            all_reduce(gradient.owned, holders, f"{gradient.flat.name}/stages").wait()


def use_over_stages(slots: Sequence[ParamSlot], flags: Tensor) -> None:
    """Set the usage flag of a parameter [slots] if any stage that holds the parameter has used it."""
    axes = {id(slot.holders): slot.holders for slot in slots if slot.holders.degree > 1}
    for key, holders in axes.items():
        places = [place for place, slot in enumerate(slots) if id(slot.holders) == key]
        used = flags[places]
        all_reduce(used, holders, "root/used").wait()
        flags[places] = used
