"""Moves the gradients of handles to their leaves, for code that uses handles inside GatheredParameters."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import Tensor

from launcher.errors import LauncherError
from launcher.models.gradients import put_gradient, seen_gradient
from launcher.zero.hooks import Hooks
from launcher.zero.slot import ParamSlot
from launcher.zero.unit import Unit


def follow_handles(hooks: Hooks) -> None:
    """Move the gradients of the handles of sharded parameters to their leaves."""
    for unit in hooks.units:
        for slot in unit.trainable_slots():
            if slot.flat.sharded:
                move = _from_handle(hooks, unit, slot)
                hooks.add_removable(Tensor.register_post_accumulate_grad_hook(slot.handle, move))


def _from_handle(hooks: Hooks, unit: Unit, slot: ParamSlot) -> Callable[[Tensor], None]:
    mine, of_unit, of_slot = ref(hooks), ref(unit), ref(slot)  # see [Note: hooks own nothing]

    def gradient_arrived(handle: Tensor) -> None:
        hooks, unit, slot = mine(), of_unit(), of_slot()
        if hooks is None or unit is None or slot is None:
            return
        hooks.begin_backward()
        gradient = seen_gradient(handle)
        put_gradient(handle, None)
        assert gradient is not None
        if unit.has_all_gradients:
            raise LauncherError(
                f"a gradient of {slot.name} arrived after the gradients of {unit.name} were already "
                "being reduced",
                where=f"parameter {slot.name}, used inside GatheredParameters",
                fix="use it through its module's forward",
            )
        if (there := seen_gradient(slot.leaf)) is not None:
            there.add_(gradient)
            return
        # the leaf may be freed, but autograd requires a gradient to have the leaf's shape
        shown, slot.leaf.data = slot.leaf.data, gradient
        put_gradient(slot.leaf, gradient)
        slot.leaf.data = shown

    return gradient_arrived
