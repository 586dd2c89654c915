"""Changes that user code makes to parameters between steps: edited values, and a changed `requires_grad`.

An unsharded parameter may be edited at any time: `p.clamp_()`, `nn.init.zeros_(p)`,
`module.load_state_dict()`, `p.data = tensor`. If the optimizer steps another copy of it (a 16-bit parameter,
an offloaded optimizer), the next step would overwrite the edit, so edits are copied into the master weights
before each step. Values are compared element by element: unchanged elements keep the extra precision of the
master weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from launcher.comm import broadcast
from launcher.errors import LauncherError
from launcher.zero.features.user_gradients import WatchedLeaf
from launcher.zero.flat import FlatBuffer
from launcher.zero.slot import ParamSlot

FREEZING = (
    "set requires_grad before initialize(), or call initialize() again when the set of trained "
    "parameters changes"
)


class ParameterEdits:
    """Detects parameter edits made since its last call, and copies them into the master weights.

    Args:
        flats: all flat buffers of a model.
    """

    def __init__(self, flats: Iterable[FlatBuffer]) -> None:
        # sharded parameters are edited inside GatheredParameters, which keeps the edits itself
        self._flats = [flat for flat in flats if not (flat.sharded and flat.trainable)]
        self._versions: dict[ParamSlot, int] = {}

    @property
    def has_work(self) -> bool:
        """Return whether any parameter can be edited or unfrozen between steps."""
        return bool(self._flats)

    def take_over(self) -> None:
        """Copy edits into the master weights. Called on every rank before a step; without an edit it costs
        neither communication nor a pass over the values.

        Raises:
            LauncherError: a parameter has changed its shape, or a frozen parameter requires a gradient.
        """
        for flat in self._flats:
            if not flat.trainable:
                _refuse_thawed(flat)
            if flat.full is None or flat.sharded:
                continue
            edited = [slot for slot in flat.slots if self._is_edited(flat, flat.full, slot)]
            if edited and flat.own_master:
                _take_edits(flat, flat.full, edited)

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


def _take_edits(flat: FlatBuffer, full: Tensor, edited: Iterable[ParamSlot]) -> None:
    """Copy the elements that differ from the master weights into them."""
    master, owned = flat.master, flat.owned
    for slot in edited:
        start, stop = max(slot.span.start, owned.start), min(slot.span.stop, owned.stop)
        if start < stop:
            _put_changed(master[start - owned.start : stop - owned.start], full[start:stop])
    flat.rest(changed=True)


def _put_changed(kept: Tensor, now: Tensor) -> None:
    """Copy the elements of `now` into `kept`, except those that are equal in the precision of `now`."""
    now = now.to(kept.device)
    kept.copy_(torch.where(kept.to(now.dtype) == now, kept, now.to(kept.dtype)))


def broadcast_edit(slot: ParamSlot, source: int) -> None:
    """Broadcast a gathered parameter from dp rank `source` into the shards and master weights. Collective."""
    flat = slot.flat
    assert flat.full is not None
    if flat.axes.divisor != flat.axes.dp.degree:
        raise LauncherError(
            f"{slot.name} is an expert parameter split by expert parallelism: no rank has the full parameter",
            where="GatheredParameters(modifier_rank=...)",
            fix="change it before initialize()",
        )
    full = flat.full
    for feature in flat.gather_features:
        feature.on_change()
    broadcast(full[slot.span], flat.axes.dp, f"{flat.name}/edit", source=source).wait()
    if flat.packed is not None:
        flat.packed.unpack()
    parts = [(flat.owned, flat.master)] + [(flat.shard_span, flat.shard)] * (flat.packed is None)
    for span, kept in parts:
        start, stop = max(slot.span.start, span.start), min(slot.span.stop, span.stop)
        if start < stop:
            _put_changed(kept[start - span.start : stop - span.start], full[start:stop])
    if flat.packed is not None:
        flat.packed.pack()
    flat.rest(changed=True)


def _bring_back(full: Tensor, slot: ParamSlot) -> None:
    """Copy the values of `p.data = tensor` into the flat buffer, and make the parameter a view of it."""
    leaf = slot.leaf
    if leaf.shape != slot.shape:
        raise LauncherError(
            f"parameter '{slot.name}' has shape {tuple(leaf.shape)}, but had shape {tuple(slot.shape)} "
            "in initialize()",
            where=f"parameter {slot.name}",
            fix="resize parameters before initialize()",
        )
    view = full[slot.span].view(slot.shape)
    view.copy_(leaf.detach())
    leaf.data = view


def _refuse_thawed(flat: FlatBuffer) -> None:
    for slot in flat.slots:
        if (slot.handle if flat.sharded else slot.leaf).requires_grad:
            raise LauncherError(
                f"parameter '{slot.name}' was frozen in initialize(), so no optimizer updates it, but "
                "it now has requires_grad=True",
                where=f"parameter {slot.name}",
                fix=FREEZING,
            )
