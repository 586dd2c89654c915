"""Whether gradients of what several tp ranks hold are what the plan of the split says of them: tried once, at the first
step, for a plan that is wrong there would train a wrong model without a word.

Where the plan says nothing, the holders must have the same gradient. Where it says "partial", theirs must differ: they
are terms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.comm import Axis, all_reduce
from launcher.errors import LauncherError
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import Slot

UNLIKE = 1e-2  # kernels that sum in no fixed order make copies differ, but not by as much
ALIKE = 1e-6
NOISE = 1e-6  # of the largest gradient: what is smaller is what rounding left


@dataclass
class _Copy:
    """This rank's gradient of a part of a parameter, and how far it is from the mean of the holders'."""

    slot: Slot
    own: Tensor
    total: Tensor
    holders: int

    @property
    def distance(self) -> float:
        return float((self.total / self.holders - self.own).abs().max())

    @property
    def size(self) -> float:
        return float((self.total / self.holders).abs().max())


def check_copies(gradients: Sequence[FlatGradient], dp: Axis, tp: Axis) -> None:
    """Compare the reduced gradients of what several tp ranks hold, before partial ones are summed. Collective.

    Raises:
        LauncherError: on every rank: the plan is wrong about some parameters, which are named.
    """
    if tp.degree == 1 or not gradients:
        return
    copies = [copy for gradient in gradients for copy in _copies(gradient, tp)]
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


def _copies(gradient: FlatGradient, tp: Axis) -> list[_Copy]:
    flat, owned = gradient.flat, gradient.owned
    found: list[_Copy] = []
    rows: list[tuple[Tensor, int]] = []
    for slot, start, stop in flat.overlaps(flat.owned):
        base = slot.offset - flat.owned.start
        for low, high, part in slot.split.shared(start, stop):
            own = owned[base + low : base + high].float()
            row = own.new_zeros(tp.degree // part.holders, own.numel())
            row[part.group] = own
            rows.append((row, part.group))
            found.append(_Copy(slot, own, own, part.holders))
    if rows:
        sums = torch.cat([row.view(-1) for row, _ in rows])
        all_reduce(sums, tp, f"{flat.name}/copies").wait()
        ends = sums.split([row.numel() for row, _ in rows])
        for copy, end, (row, group) in zip(found, ends, rows, strict=True):
            copy.total = end.view_as(row)[group]
    return found


def _wrong(names: list[str], what: str, how: str) -> LauncherError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return LauncherError(
        f"every tensor-parallel rank has {', '.join(names[:4])}{more}, and their gradients {what}: the plan of "
        "this model is wrong about them",
        where="tensor_parallel",
        fix=f"write a rule for them in tensor_parallel.partition_config.layer_specs: {how}",
    )
