"""What a script does to parameters between steps: values that it edits, and `requires_grad` that it changes.

A parameter that is whole may be edited at any time: `p.clamp_()`, `nn.init.zeros_(p)`, `module.load_state_dict()`,
`p.data = tensor`. Where the optimizer steps another copy of it (a 16-bit parameter, an offloaded optimizer), the next
step would undo that; so before a step what was edited is taken over. Elements are compared: those that nobody has
changed keep the digits that only the master weights have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from launcher.errors import LauncherError
from launcher.zero.flat import FlatBuffer
from launcher.zero.slot import ParamSlot
from launcher.zero.watched_leaf import WatchedLeaf

FREEZING = (
    "set requires_grad before initialize(), or call initialize() again where the trained parameters change"
)


class ParameterEdits:
    """Takes over what was edited since it last looked.

    Args:
        flats: all buffers of a model.
    """

    def __init__(self, flats: Iterable[FlatBuffer]) -> None:
        self._flats = list(flats)
        self._versions: dict[ParamSlot, int] = {}

    def take_over(self) -> None:
        """Called on every rank before a step; costs no communication and, without an edit, no pass over values.

        Raises:
            LauncherError: a parameter has another shape now, or is to be trained though it was frozen.
        """
        for flat in self._flats:
            if not flat.trainable:
                _refuse_thawed(flat)
            if flat.full is None or flat.sharded:
                continue
            edited = [slot for slot in flat.slots if self._is_edited(flat, flat.full, slot)]
            if edited and flat.own_master:
                flat.take_edits(edited)

    def _is_edited(self, flat: FlatBuffer, full: Tensor, slot: ParamSlot) -> bool:
        leaf: Any = slot.leaf
        version, at = leaf._version, full.data_ptr() + slot.offset * full.element_size()
        touched = self._versions.setdefault(slot, version) != version or leaf.__dict__.get(
            "zero_touched", False
        )
        self._versions[slot] = version
        if leaf.data_ptr() != at and slot.numel:
            _bring_back(full, slot)
            touched = True
        if touched and isinstance(leaf, WatchedLeaf):
            leaf.zero_touched = False
        return touched


def _bring_back(full: Tensor, slot: ParamSlot) -> None:
    """`p.data = tensor` has put other memory in the place of the buffer's: take the values."""
    leaf = slot.leaf
    if leaf.shape != slot.shape:
        raise LauncherError(
            f"parameter '{slot.name}' has the shape {tuple(leaf.shape)}, and had {tuple(slot.shape)} in initialize()",
            where=f"parameter {slot.name}",
            fix="give a model its shapes before initialize()",
        )
    view = full[slot.span].view(slot.shape)
    view.copy_(leaf.detach())
    leaf.data = view


def _refuse_thawed(flat: FlatBuffer) -> None:
    for slot in flat.slots:
        if (slot.handle if flat.sharded else slot.leaf).requires_grad:
            raise LauncherError(
                f"parameter '{slot.name}' was frozen in initialize(), so that no optimizer steps it, and requires a "
                "gradient now",
                where=f"parameter {slot.name}",
                fix=FREEZING,
            )
