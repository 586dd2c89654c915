"""The norm of a step's gradients, and which parameters got one: one collective for all answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.comm import all_reduce
from launcher.errors import LauncherError
from launcher.tensor.split import DimSlice
from launcher.zero.flat import FlatBuffer
from launcher.zero.slot import ParamSlot

if TYPE_CHECKING:
    from launcher.zero.model import ZeroModel

NORM_CHUNK = 4096  # fp32 sums of squares lose digits over long runs: chunks this long, summed in fp64
SquaredRange = tuple[slice, int]  # of a share, and how many tp ranks have it in theirs


def norm_and_use(zero: ZeroModel, more: Tensor | None = None) -> tuple[Tensor, list[bool], Tensor]:
    """Return the sum of squares of the reduced gradient over all ranks (fp64 scalar), which trainable slots got one,
    and the sum of `more` over dp and tp; all in host memory.

    Once a step: partial gradients become sums here. Marks slots unused everywhere as unused, and the others as used.

    [Note: one wait a step]

    What decides how a step goes on (the norm, which parameters got a gradient) lies on the device, and the host must
    know it. It waits for the device once, when all of it is in one tensor and has been summed over the ranks. Whoever
    adds a question to a step adds it to this tensor.

    Args:
        more: fp64 [n], what this rank adds.
    """
    for complete in zero.callbacks.before_norm:
        complete()
    device = zero.pool.device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    of_host = torch.zeros((), dtype=torch.float64)  # of gradients that are there
    if zero.policy.compute_norm:
        for gradient in zero.gradients:  # every shard group has all of it
            found = gradient.squares() / gradient.flat.axes.replicate.degree
            (of_host if found.device.type == "cpu" else squares).add_(found)
            gradient.rest()
    slots = zero.trainable_slots
    flags = [*(slot.used for slot in slots), any(gradient.discarded for gradient in zero.gradients)]
    used = torch.tensor(flags, dtype=torch.float64)
    report = torch.cat([of_host.reshape(1), used]).to(device, non_blocking=True)
    report[0].add_(squares)
    if more is not None:
        report = torch.cat([report, more])
    for axis in (zero.axis, zero.tp):
        all_reduce(report, axis, "root/norm").wait()
    if zero.policy.compute_norm:
        all_reduce(report[:1], zero.pp, "root/norm").wait()
    for merge in zero.callbacks.merge_use:
        merge(slots, report[1 : 1 + len(slots)])
    report = report.cpu()  # [Note: one wait a step]
    used, more = report[1 : 1 + len(slots)], report[2 + len(slots) :]
    discarded, ranks = int(report[1 + len(slots)]), zero.axis.degree * zero.tp.degree
    if 0 < discarded < ranks:
        raise _uneven_discard(discarded, ranks)
    zero.reducer.measured = True
    flags = [bool(count) for count in used.tolist()]
    for slot, flag in zip(slots, flags, strict=True):
        slot.used = flag
    return report[0], flags, more


def _uneven_discard(count: int, ranks: int) -> LauncherError:
    """Make the error, which all ranks raise before any of them steps: copies of the model would not stay the same."""
    return LauncherError(
        f"{count} of {ranks} ranks discarded gradients after they had been reduced over all ranks, so the ranks "
        "would step to different weights",
        where="engine.step()",
        fix="call zero_grad(), or set p.grad = None, on every rank or on none",
    )


def held_by_several(
    flat: FlatBuffer, span: slice, *, partial_only: bool = False
) -> Iterator[tuple[slice, DimSlice, ParamSlot]]:
    """Yield ranges of a buffer over `span` of the flat buffer that several tp ranks hold. These have the same ranges.

    Args:
        partial_only: only those whose gradients are terms of a sum.
    """
    for slot, start, stop in flat.overlaps(span):
        if slot.split.partial or not partial_only:
            base = slot.offset - span.start
            for low, high, part in slot.split.shared(start, stop):
                yield slice(base + low, base + high), part, slot


def repeated_ranges(flat: FlatBuffer) -> list[SquaredRange]:
    """Return the ranges of a share that other tp ranks have in theirs, too."""
    return [(span, part.holders) for span, part, _ in held_by_several(flat, flat.shard_span)]


def sum_of_squares(share: Tensor, repeated: list[SquaredRange]) -> Tensor:
    """Return the sum of squares of a share of a gradient, fp64 scalar beside it; what h tp ranks hold counts 1/h."""
    total = _squares(share)
    held: dict[int, list[Tensor]] = defaultdict(list)
    for span, holders in repeated:
        held[holders].append(share[span])
    for holders, parts in held.items():
        less = total - _squares(torch.cat(parts)) * (1 - 1 / holders)
        total = torch.where(total.isfinite(), less, total)  # infinity minus infinity is no number
    return total


def _squares(values: Tensor) -> Tensor:
    even = values.numel() // NORM_CHUNK * NORM_CHUNK
    rows = torch.linalg.vector_norm(values[:even].view(-1, NORM_CHUNK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(values[even:], dtype=torch.float32)
    return rows.double().square().sum() + rest.double().square()
