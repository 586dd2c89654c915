"""Whether gradients of what several tp ranks hold are what the plan of the split says of them: tried once, at the first
step, for a plan that is wrong there would train a wrong model without a word.

Where the plan says nothing, the holders must have the same gradient. Where it says "partial", theirs must differ: they
are terms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.comm import Axis, all_reduce
from launcher.errors import LauncherError
from launcher.tensor.split import Part
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import Slot

UNLIKE = 1e-2  # kernels that sum in no fixed order make copies differ, but not by as much
ALIKE = 1e-6
SAMPLE = 1 << 14  # elements of a range that are looked at
NOISE = 1e-6  # of the largest gradient: what is smaller is what rounding left


@dataclass
class _Copy:
    """This rank's gradient of a part of a parameter, and how far it is from the mean of the holders'."""

    slot: Slot
    own: Tensor
    total: Tensor
    part: Part

    @property
    def distance(self) -> float:
        return float((self.total / self.part.holders - self.own).abs().max())

    @property
    def size(self) -> float:
        return float((self.total / self.part.holders).abs().max())


def check_copies(gradients: Sequence[FlatGradient], dp: Axis, tp: Axis) -> None:
    """Compare the reduced gradients of what several tp ranks hold, before partial ones are summed. Collective.

    Raises:
        LauncherError: on every rank: the plan is wrong about some parameters, which are named.
    """
    if tp.degree == 1 or not gradients:
        return
    copies = [copy for gradient in gradients for copy in _own(gradient)]
    _sum(copies, tp, gradients[0].flat.pool.device)
    index = {slot: i for i, slot in enumerate(s for gradient in gradients for s in gradient.flat.slots)}
    flags = torch.zeros(
        2, len(index), dtype=torch.float64
    )  # for each slot: ranges that differ, that are alike
    floor = NOISE * max((copy.size for copy in copies), default=0.0)
    for copy in copies:
        if copy.size > floor and math.isfinite(copy.distance):
            flags[0, index[copy.slot]] += copy.distance > UNLIKE * copy.size
            flags[1, index[copy.slot]] += copy.distance <= ALIKE * copy.size
    flags = flags.to(gradients[0].flat.pool.device)
    for axis in (dp, tp):
        all_reduce(flags.view(-1), axis, "root/copies").wait()
    found = list(zip(index, *flags.tolist(), strict=True))
    parts = [slot.name for slot, unlike, _ in found if unlike and not slot.split.partial]
    wholes = [slot.name for slot, unlike, alike in found if alike and not unlike and slot.split.partial]
    if parts:
        raise _wrong(
            parts, "differ from rank to rank, and nothing sums them", '"skip" with "grad_allreduce": true'
        )
    if wholes:
        raise _wrong(
            wholes, "are the same on all ranks, and are summed", '"skip" with "grad_allreduce": false'
        )


def _own(gradient: FlatGradient) -> Iterator[_Copy]:
    flat, owned = gradient.flat, gradient.owned
    for slot, start, stop in flat.overlaps(flat.owned):
        base = slot.offset - flat.owned.start
        for low, high, part in slot.split.shared(start, stop):
            own = owned[base + low : base + min(high, low + SAMPLE)].float()
            yield _Copy(slot, own, own, part)


def _sum(copies: list[_Copy], tp: Axis, device: torch.device) -> None:
    """Fill in the totals over the holders. A range has a row for each group of holders; the others leave it zero."""
    rows = []
    for copy in copies:
        row = copy.own.new_zeros(tp.degree // copy.part.holders, copy.own.numel())
        row[copy.part.group] = copy.own
        rows.append(row)
    sums = torch.cat([torch.zeros(1, device=device), *(row.view(-1) for row in rows)])  # all ranks take part
    all_reduce(sums, tp, "root/copies").wait()
    for copy, total in zip(copies, sums[1:].split([row.numel() for row in rows]), strict=True):
        copy.total = total.view(-1, copy.own.numel())[copy.part.group]


def _wrong(names: list[str], what: str, how: str) -> LauncherError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return LauncherError(
        f"every tensor-parallel rank has {', '.join(names[:4])}{more}, and their gradients {what}: the plan of "
        "this model is wrong about them",
        where="tensor_parallel",
        fix=f"write a rule for them in tensor_parallel.partition_config.layer_specs: {how}",
    )
