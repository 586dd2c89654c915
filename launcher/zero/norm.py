"""The gradient norm of a step and the parameters that got a gradient, from a single all-reduce."""

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

NORM_CHUNK = 4096  # long fp32 sums of squares lose precision, so chunks of this size are summed in fp64
SquaredRange = tuple[slice, int]  # a range of a share, and the number of tp ranks that hold it


def norm_and_use(zero: ZeroModel, more: Tensor | None = None) -> tuple[Tensor, list[bool], Tensor]:
    """Return the squared norm of the reduced gradient over all ranks (fp64 scalar), a flag for each trainable
    slot that got a gradient, and the sum of `more` over dp and tp; all in host memory.

    Called once a step. Partial gradients become sums here. Marks a slot as used if any rank used it, else as
    unused.

    [Note: one wait a step]

    The results that decide how a step continues (the norm, and which parameters got a gradient) are on the
    device, and the host needs them. To wait for the device only once, all of them are packed into one tensor
    and summed over the ranks first. Any further value that the host needs in a step must be added to this
    tensor.

    Args:
        more: further values of this rank to sum, fp64 [n].
    """
    for complete in zero.callbacks.before_norm:
        complete()
    device = zero.pool.device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    of_host = torch.zeros((), dtype=torch.float64)  # gradients in host memory
    if zero.policy.compute_norm:
        for gradient in zero.gradients:  # every shard group holds the whole gradient
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
    zero.reducer.norm_computed = True
    flags = [bool(count) for count in used.tolist()]
    for slot, flag in zip(slots, flags, strict=True):
        slot.used = flag
    return report[0], flags, more


def _uneven_discard(count: int, ranks: int) -> LauncherError:
    """Return the error that all ranks raise before any of them steps, or the replicas would diverge."""
    return LauncherError(
        f"{count} of {ranks} ranks discarded gradients after they were reduced over all ranks, so the "
        "weights of the ranks would diverge",
        where="engine.step()",
        fix="call zero_grad(), or set p.grad = None, on all ranks or on none",
    )


def held_by_several(
    flat: FlatBuffer, span: slice, *, partial_only: bool = False
) -> Iterator[tuple[slice, DimSlice, ParamSlot]]:
    """Yield the ranges of a buffer over `span` that several tp ranks hold. These ranks yield the same ranges.

    Args:
        partial_only: yield only ranges whose gradients are terms of a sum.
    """
    for slot, start, stop in flat.overlaps(span):
        if slot.split.partial or not partial_only:
            base = slot.offset - span.start
            for low, high, part in slot.split.shared(start, stop):
                yield slice(base + low, base + high), part, slot


def repeated_ranges(flat: FlatBuffer) -> list[SquaredRange]:
    """Return the ranges of a share that other tp ranks also hold."""
    return [(span, part.holders) for span, part, _ in held_by_several(flat, flat.shard_span)]


def sum_of_squares(share: Tensor, repeated: list[SquaredRange]) -> Tensor:
    """Return the sum of squares of a gradient share, as an fp64 scalar on its device. Elements that h tp
    ranks hold are weighted by 1/h."""
    total = _squares(share)
    held: dict[int, list[Tensor]] = defaultdict(list)
    for span, holders in repeated:
        held[holders].append(share[span])
    for holders, parts in held.items():
        less = total - _squares(torch.cat(parts)) * (1 - 1 / holders)
        total = torch.where(total.isfinite(), less, total)  # inf - inf would give nan
    return total


def _squares(values: Tensor) -> Tensor:
    even = values.numel() // NORM_CHUNK * NORM_CHUNK
    rows = torch.linalg.vector_norm(values[:even].view(-1, NORM_CHUNK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(values[even:], dtype=torch.float32)
    return rows.double().square().sum() + rest.double().square()
