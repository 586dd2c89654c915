"""Access to gradients by user code: discarding kept gradients, and reading the local sum of this rank."""

from __future__ import annotations

from torch import Tensor

from launcher.errors import LauncherError
from launcher.models.gradients import put_gradient, seen_gradient
from launcher.zero.gradient_state import GradientState
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamSlot


def forget(gradient: FlatGradient, slots: set[ParamSlot], *, reduced: bool) -> None:
    """Discard the kept gradients of some parameters, and their `.grad`. A reduced gradient stays in a reduced
    state even if nothing is left of it: the other ranks will not reduce it again.

    Args:
        reduced: the kept gradient is the sum over ranks.
    """
    discarded = gradient.discarded or (reduced and gradient.kept)
    if len(slots) == len(gradient.flat.slots):
        left = GradientState.SPENT if gradient.reduced else GradientState.EMPTY
        if gradient.kept and not gradient.sharded:
            gradient.full_buffer().zero_()
        gradient.zero()
        gradient.state = left
    else:
        _forget_some(gradient, slots)
    gradient.discarded = discarded


def _forget_some(gradient: FlatGradient, slots: set[ParamSlot]) -> None:
    if gradient.kept:
        kept = gradient.owned if gradient.sharded else gradient.full_buffer()
        span = gradient.flat.owned if gradient.sharded else slice(0, gradient.flat.numel)
        for slot, start, stop in gradient.flat.overlaps(span):
            if slot in slots:
                at = slot.offset - span.start
                kept[at + start : at + stop].zero_()
        gradient.rest()
    for slot in slots:
        slot.used = False
        put_gradient(slot.leaf, None)
    gradient.shown -= slots


def local_gradient(gradient: FlatGradient, slot: ParamSlot) -> Tensor | None:
    """Return this rank's local sum of a parameter's gradient [its shape] since the last reduction, for
    reading and writing; None if no gradient has arrived.

    Raises:
        LauncherError: the local sum cannot be separated from an earlier reduced sum.
    """
    if gradient.state is GradientState.REOPENED:
        raise LauncherError(
            f"the gradient of {slot.name} was already reduced before the last backward, so the local "
            "contribution of this rank cannot be separated from it",
            fix="read the local gradient before the reduction, or after the next one",
        )
    if gradient.sharded:
        return seen_gradient(slot.leaf)
    if gradient.kept or any(seen_gradient(one.leaf) is not None for one in gradient.flat.slots):
        gradient.collect()
    return gradient.full_buffer()[slot.span].view(slot.shape) if slot.used else None
