"""Elements that several ranks of the tp axis hold: counted once in what is global, and summed where each holder's
gradient is one term of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.comm import Axis, all_reduce
from launcher.tensor.split import DimSlice
from launcher.zero.flat import FlatBuffer
from launcher.zero.slot import ParamSlot

if TYPE_CHECKING:
    from launcher.zero.gradients import FlatGradient

NORM_CHUNK = 4096  # fp32 sums of squares lose digits over long runs: chunks this long, summed in fp64


def shared(
    flat: FlatBuffer, span: slice, *, partial_only: bool = False
) -> Iterator[tuple[slice, DimSlice, ParamSlot]]:
    """Ranges of a buffer over `span` of the flat buffer that several tp ranks hold. These ranks have the same ranges.

    Args:
        partial_only: only those whose gradients are terms of a sum.
    """
    for slot, start, stop in flat.overlaps(span):
        if slot.split.partial or not partial_only:
            base = slot.offset - span.start
            for low, high, part in slot.split.shared(start, stop):
                yield slice(base + low, base + high), part, slot


def sum_over_holders(
    terms: Sequence[Tensor], parts: Sequence[DimSlice], tp: Axis, device: torch.device, tag: str
) -> list[Tensor]:
    """fp32 sums of each term over the ranks that hold its part. One collective along tp, of nothing where there are no
    terms.

    A part that not all ranks hold has as many rows in the buffer as there are groups of holders; the other groups
    leave the row zero.
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
    """Give the holders of partial gradients their sum. One collective along tp, after the reduction over dp."""
    terms: list[Tensor] = []
    parts: list[DimSlice] = []
    for gradient in gradients:
        for span, part, _ in shared(gradient.flat, gradient.flat.owned, partial_only=True):
            terms.append(gradient.owned[span])
            parts.append(part)
    if terms:
        torch._foreach_copy_(terms, sum_over_holders(terms, parts, tp, device, "root/partial"))


def sum_over_stages(gradients: Sequence[FlatGradient]) -> None:
    """Give the pipeline stages that hold a parameter the sum of their gradients, after the reduction over dp. Their
    buffers are alike, so each owns the same elements there as its neighbours."""
    for gradient in gradients:
        if (holders := gradient.flat.slots[0].holders).degree > 1:
            all_reduce(gradient.owned, holders, f"{gradient.flat.name}/stages").wait()


def use_over_stages(slots: Sequence[ParamSlot], flags: Tensor) -> None:
    """Let a flag of use [slots] hold where any stage that holds the parameter has used it."""
    axes = {id(slot.holders): slot.holders for slot in slots if slot.holders.degree > 1}
    for key, holders in axes.items():
        places = [place for place, slot in enumerate(slots) if id(slot.holders) == key]
        used = flags[places]
        all_reduce(used, holders, "root/used").wait()
        flags[places] = used


def sum_of_squares(gradient: FlatGradient) -> Tensor:
    """Of this rank's share of a reduced gradient, fp64 scalar on the CPU; what h tp ranks hold counts 1/h, and of the
    pipeline stages that hold a parameter the first one counts it."""
    if gradient.flat.slots[0].holders.rank > 0:
        return torch.zeros((), dtype=torch.float64)
    share = gradient.share
    total = _squares(share)
    held: dict[int, list[Tensor]] = defaultdict(list)
    for span, part, _ in shared(gradient.flat, gradient.flat.shard_span):
        held[part.holders].append(share[span])
    if torch.isfinite(total):  # infinity minus infinity is no number
        for holders, parts in held.items():
            total -= _squares(torch.cat(parts)) * (1 - 1 / holders)
    return total


def _squares(values: Tensor) -> Tensor:
    even = values.numel() // NORM_CHUNK * NORM_CHUNK
    rows = torch.linalg.vector_norm(values[:even].view(-1, NORM_CHUNK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(values[even:], dtype=torch.float32)
    return (rows.double().square().sum() + rest.double().square()).cpu()
