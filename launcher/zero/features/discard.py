"""Gradients in the hands of users: what of them is thrown away, and what this rank alone has added up."""

from __future__ import annotations

from torch import Tensor

from launcher.errors import LauncherError
from launcher.models.gradients import put_gradient, seen_gradient
from launcher.zero.gradient_state import GradientState
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamSlot


def forget(gradient: FlatGradient, slots: set[ParamSlot], *, reduced: bool) -> None:
    """Forget what is kept of the gradients of some parameters, and `.grad`. What is left of a reduced gradient is a
    reduced one, also where nothing is left: the other ranks will not reduce it again.

    Args:
        reduced: what is kept is the sum over ranks.
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
    """Return what this rank alone has added up for a parameter [its shape] since the last reduction, to read and to
    write; None where no gradient has come.

    Raises:
        LauncherError: it cannot be told from an earlier sum.
    """
    if gradient.state is GradientState.REOPENED:
        raise LauncherError(
            f"the gradient of {slot.name} was reduced, and then another backward came: what this rank alone has "
            "added to it cannot be told from the rest",
            fix="ask before the reduction, or after the next one",
        )
    if gradient.sharded:
        return seen_gradient(slot.leaf)
    if gradient.kept or any(seen_gradient(one.leaf) is not None for one in gradient.flat.slots):
        gradient.collect()
    return gradient.full_buffer()[slot.span].view(slot.shape) if slot.used else None
