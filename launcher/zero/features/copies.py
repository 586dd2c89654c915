"""A check of the tensor-parallel plan against the gradients of parameters that several tp ranks hold.

It runs once, in the first step: with a wrong plan the model would train wrongly without an error. By default
the holders of a parameter must have the same gradient. If the plan says "partial", their gradients must
differ, because they are terms of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from launcher.comm import Axis, all_reduce
from launcher.errors import LauncherError, first_names
from launcher.zero.features.holders import sum_over_holders
from launcher.zero.gradients import FlatGradient
from launcher.zero.norm import held_by_several
from launcher.zero.slot import ParamSlot

UNLIKE = 1e-2  # nondeterministic kernels make copies differ, but by less than this
ALIKE = 1e-6
SAMPLE = 1 << 14  # maximum elements of a range that are compared
NOISE = 1e-6  # relative to the largest gradient: smaller gradients are rounding errors


@dataclass
class _Copy:
    """A part of a parameter: the size of its gradient (averaged over the holders), and the distance of this
    rank's gradient from that mean."""

    slot: ParamSlot
    size: float
    distance: float


class CopyCheck:
    """Compares the reduced gradients of parameters that several tp ranks hold, in the first step.

    Args:
        gradients: the gradients of the model.
        dp, tp: the axes over which the gradients are compared; tp has several ranks.
    """

    def __init__(self, gradients: Sequence[FlatGradient], dp: Axis, tp: Axis) -> None:
        self._gradients, self._dp, self._tp, self._done = gradients, dp, tp, False

    def once(self) -> None:
        """Compare the gradients before partial ones are summed; later calls do nothing. Collective.

        Raises:
            LauncherError: on every rank: the plan is wrong about the parameters named.
        """
        if not self._done and self._gradients:
            check_copies(self._gradients, self._dp, self._tp)
        self._done = True


def check_copies(gradients: Sequence[FlatGradient], dp: Axis, tp: Axis) -> None:
    """Compare the reduced gradients of parameters that several tp ranks hold, before partial ones are summed.
    Collective.

    Raises:
        LauncherError: on every rank: the plan is wrong about the parameters named.
    """
    device = gradients[0].flat.pool.device
    copies = _copies(gradients, tp, device)
    index = {slot: i for i, slot in enumerate(s for gradient in gradients for s in gradient.flat.slots)}
    # for each slot: the number of ranges that differ, and of those that are equal
    flags = torch.zeros(2, len(index), dtype=torch.float64)
    floor = NOISE * max((copy.size for copy in copies), default=0.0)
    for copy in copies:
        if copy.size > floor and math.isfinite(copy.distance):
            flags[0, index[copy.slot]] += copy.distance > UNLIKE * copy.size
            flags[1, index[copy.slot]] += copy.distance <= ALIKE * copy.size
    flags = flags.to(device)
    for axis in (dp, tp):
        all_reduce(flags.view(-1), axis, "root/copies").wait()
    found = list(zip(index, *flags.tolist(), strict=True))
    parts = [slot.name for slot, unlike, _ in found if unlike and not slot.split.partial]
    wholes = [slot.name for slot, unlike, alike in found if alike and not unlike and slot.split.partial]
    if parts:
        raise _wrong(
            parts, "differ between ranks but would not be summed", '"skip" with "grad_allreduce": true'
        )
    if wholes:
        raise _wrong(
            wholes, "are identical on all ranks but would be summed", '"skip" with "grad_allreduce": false'
        )


def _copies(gradients: Sequence[FlatGradient], tp: Axis, device: torch.device) -> list[_Copy]:
    found = []
    for gradient in gradients:
        for span, part, slot in held_by_several(gradient.flat, gradient.flat.owned):
            found.append((gradient.owned[span][:SAMPLE].float(), part, slot))
        gradient.rest(changed=False)
    owns, parts = [own for own, _, _ in found], [part for _, part, _ in found]
    totals = sum_over_holders(owns, parts, tp, device, "root/copies")
    copies = []
    for (own, part, slot), total in zip(found, totals, strict=True):
        mean = total / part.holders
        own = own.to(mean.device)  # a gradient may be in host memory
        copies.append(_Copy(slot, float(mean.abs().max()), float((mean - own).abs().max())))
    return copies


def _wrong(names: list[str], what: str, how: str) -> LauncherError:
    return LauncherError(
        f"{first_names(names)}: replicated on the tensor-parallel ranks, but their gradients {what}; "
        "the tensor-parallel plan of this model is wrong for these parameters",
        where="tensor_parallel",
        fix=f"add a rule for them to tensor_parallel.partition_config.layer_specs: {how}",
    )
