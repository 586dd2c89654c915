"""A model under ZeRO: its units, and the interface for the engine, the optimizer and checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from launcher.errors import ElsewhereError
from launcher.tensor.split import whole
from launcher.zero.features.discard import forget
from launcher.zero.features.edits import broadcast_edit
from launcher.zero.features.user_gradients import warn_of_discard_once
from launcher.zero.flat import EXACT, FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.hooks import Hooks
from launcher.zero.layout import LocalModel, ShardLayout
from launcher.zero.norm import norm_and_use
from launcher.zero.reduce import Reducer, order_of_reduction
from launcher.zero.sharded_parameter import ShardedParameter
from launcher.zero.slot import ParamSlice, ParamSlot
from launcher.zero.unit import Unit
from launcher.zero.unshard import Unsharder

if TYPE_CHECKING:
    from launcher.zero.features.checks import StepChecks

_live: weakref.WeakSet[ZeroModel] = weakref.WeakSet()


def live_models() -> list[ZeroModel]:
    """Return every ZeRO model in this process, oldest first."""
    return sorted(_live, key=lambda model: model.serial)


@dataclass
class StepCallbacks:
    """Callbacks that features run during a step, in this order. All lists are empty in a plain run;
    `features/attach.py` fills them.

    Attributes:
        before_step: run first in a step: copy the user's edits of parameters into the master weights.
        before_norm: run after the gradients are reduced and before their norm is computed, for example to sum
            partial gradients.
        before_replay: run before the microbatches of a step are recomputed: reset what the first pass has
            counted.
        merge_use: called with the trainable slots and their usage flags: set the flags that are set on other
            ranks.
    """

    before_step: list[Callable[[], None]] = field(default_factory=list)
    before_norm: list[Callable[[], None]] = field(default_factory=list)
    before_replay: list[Callable[[], None]] = field(default_factory=list)
    merge_use: list[Callable[[Sequence[ParamSlot], Tensor], None]] = field(default_factory=list)


class ZeroModel:
    """A model under ZeRO.

    Args:
        module: the user's model. Only the storage of its parameters changes.
        units: the units, root unit last.
        layout: how the flat buffers are sharded.
        parts: how the local model differs from the whole one.

    Attributes:
        axis, tp, pp: the data, tensor and pipeline parallel axes.
        trainable_slots: the slots of all gradients, in order.
    """

    def __init__(self, module: nn.Module, units: list[Unit], layout: ShardLayout, parts: LocalModel) -> None:
        self.module, self.units = module, units
        self.policy, self.axes = layout.policy, layout.axes
        self.pool, self.placements = layout.pool, layout.placements
        self.axis, self.tp, self.pp, self.elsewhere = self.axes.dp, parts.tp, parts.pp, parts.elsewhere
        self.flats: list[FlatBuffer] = [flat for unit in units for flat in unit.flats]
        self.gradients: list[FlatGradient] = [gradient for unit in units for gradient in unit.gradients]
        self.trainable_slots = [slot for gradient in self.gradients for slot in gradient.flat.slots]
        self._gradient_of = {gradient.flat: gradient for gradient in self.gradients}
        self.unsharder = Unsharder(
            self.policy,
            self.placements.max_loaded_numel,
            self.placements.max_loaded_units,
            saves_memory=self.placements.one_memory,
        )
        self.reducer = Reducer(order_of_reduction(units), self.policy)
        self.hooks = Hooks(units, self.unsharder, self.reducer)
        self.hooks.keeps = self  # alive while modules call the hooks
        self.slots: dict[str, ParamSlot] = {slot.name: slot for flat in self.flats for slot in flat.slots}
        self._slot_of_parameter = {id(slot.leaf): slot for slot in self.slots.values()}
        self._unit_of = {slot: unit for unit in units for flat in unit.flats for slot in flat.slots}
        self.callbacks = StepCallbacks()
        self.checks: StepChecks | None = None
        self.serial: int = max((model.serial for model in _live), default=0) + 1
        _live.add(self)

    def retire(self) -> None:
        """Remove the hooks, free gathered parameters, and remove this model from `live_models`."""
        self.hooks.remove()
        self.reshard_all()
        _live.discard(self)

    # ---- slices -----------------------------------------------------------------------------

    def slices(self) -> list[ParamSlice]:
        """Return the slices of the master weights that this rank owns."""
        return [piece for flat in self.flats for piece in flat.slices()]

    def written_slices(self) -> list[ParamSlice]:
        """Return the slices that this rank writes to a checkpoint.

        The slices of all dp ranks together cover every local parameter once. Elements that several tp ranks
        hold are in the slices of each of them; the split records which rank comes first. Parameters that
        several pipeline stages hold are written by the first of these stages.
        """
        # the first shard group writes for all groups
        firsts = [flat for flat in self.flats if flat.axes.replicate.rank == 0]
        flats = [flat for flat in firsts if flat.slots[0].holders.rank == 0]
        return [piece for flat in flats for piece in flat.slices(span=flat.shard_span)]

    def publish(self) -> None:
        """Copy the updated master weights into the parameters of every rank."""
        for pending in [pending for flat in self.flats for pending in flat.publish()]:
            pending.wait()

    def rest(self) -> None:
        """Release offloaded tensors that were read but not modified."""
        for flat in self.flats:
            flat.rest()

    # ---- gradients --------------------------------------------------------------------------

    def place_of_gradient(self, leaf: Tensor) -> Tensor | None:
        """Return the buffer in which the gradients of a leaf accumulate (see `FlatGradient.place`)."""
        slot = self._slot_of_parameter.get(id(leaf))
        return None if slot is None else self._gradient_of[slot.flat].place(slot)

    @contextmanager
    def shaped(self, leaves: Iterable[Tensor]) -> Iterator[None]:
        """Give sharded leaves their full shape, without memory, inside the `with`.

        The shape is all that autograd needs to accept gradients that are already computed. Units with a
        parameter whose gradient hooks may read it are gathered.
        """
        slots = [slot for leaf in leaves if (slot := self.find_slot(leaf)) and not slot.flat.is_unsharded]
        for unit in dict.fromkeys(self._unit_of[slot] for slot in slots if slot.is_watched):
            self.unsharder.use(unit, "backward")
        try:
            for slot in slots:
                slot.flat.show_shape(slot)
            yield
        finally:
            for slot in slots:
                slot.flat.hide_shape(slot)

    def norm_and_use(self, more: Tensor | None = None) -> tuple[Tensor, list[bool], Tensor]:
        """Compute the gradient norm and which parameters got a gradient. Collective; see `norm.py`."""
        return norm_and_use(self, more)

    @property
    def mean_divisor(self) -> float:
        """Return the divisor that turns reduced gradients into the mean over ranks."""
        divided = self.policy.predivide
        return 1.0 if divided is None else self.axis.degree / divided

    @property
    def sum_divisor(self) -> float:
        """Return the divisor that turns reduced gradients into the sum over ranks."""
        return self.mean_divisor / self.axis.degree

    def zero_grad(self) -> None:
        """Clear the gradients after a step that is complete on every rank."""
        self.hooks.abandon()
        self.hooks.losses_were_scaled.clear()
        self.reducer.norm_computed = False
        for gradient in self.gradients:
            gradient.zero()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Discard the gradients of the given parameters; parameters of other models are ignored."""
        found = (self.find_slot(parameter) for parameter in parameters)
        self._forget({slot for slot in found if slot is not None})

    def discard(self) -> None:
        """Discard the gradients of all parameters, as the user's `zero_grad()` does."""
        self._forget(set(self.trainable_slots))

    def _forget(self, slots: set[ParamSlot]) -> None:
        if not slots:
            return
        if not self.reducer.plan.last and any(gradient.kept for gradient in self.gradients):
            warn_of_discard_once(self.axis.rank)
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:  # a user hook may call this during a backward, which then continues
            self.hooks.abandon()
        for gradient in self.gradients:
            if of_buffer := slots.intersection(gradient.flat.slots):
                forget(gradient, of_buffer, reduced=not self.reducer.holds_local(gradient))
        if not any(gradient.kept for gradient in self.gradients):
            self.hooks.losses_were_scaled.clear()
            self.reducer.norm_computed = False

    # ---- unsharded parameters ---------------------------------------------------------------

    @contextmanager
    def gathered(
        self, parameters: Iterable[Tensor] | None = None, modifier_rank: int | None = None
    ) -> Iterator[None]:
        """Gather full local parameters inside the `with`, on every rank. A collective over dp.

        Args:
            parameters: the parameters to gather, with their whole units; default: all.
            modifier_rank: the dp rank whose edits of `parameters` are kept and broadcast; None: edits of
                sharded parameters are lost.
        """
        slots = self._slots_of(parameters)
        units = list(dict.fromkeys(self._unit_of[slot] for slot in slots if slot.flat.sharded))
        opened = [unit for unit in units if not unit.is_unsharded]
        for unit in opened:
            unit.unshard(EXACT)
        for unit in opened:
            unit.wait_for_unshard()
            unit.held = True
        try:
            yield
            if modifier_rank is not None:
                for slot in slots:
                    broadcast_edit(slot, modifier_rank)
        finally:
            for unit in opened:
                unit.held = False
                self.unsharder.reshard(unit)

    def _slots_of(self, parameters: Iterable[Tensor] | None) -> list[ParamSlot]:
        if parameters is None:
            return list(self.slots.values())
        slots = [self.slot_of(parameter) for parameter in parameters]
        return list(dict.fromkeys(slot for slot in slots if slot is not None))

    def slot_of(self, parameter: Tensor) -> ParamSlot | None:
        """Return the slot of a parameter (leaf or handle) of this model, or None for any other tensor.

        Raises:
            ElsewhereError: the parameter belongs to another pipeline stage.
        """
        if (where := self.elsewhere.get(parameter)) is not None:
            raise ElsewhereError(
                f"{where}, but this rank is stage {self.pp.rank}",
                fix="on each rank, pass only parameters of its stage: engine.module.named_parameters()",
            )
        return self.find_slot(parameter)

    def find_slot(self, parameter: Tensor) -> ParamSlot | None:
        """Return the slot as `slot_of` does, but None for a parameter of another stage."""
        if isinstance(parameter, ShardedParameter):  # a copy of a handle (its .data) also refers to the slot
            holder = parameter.zero_holder
            return holder if isinstance(holder, ParamSlot) and holder in self._unit_of else None
        return self._slot_of_parameter.get(id(parameter))

    def unit_of(self, slot: ParamSlot) -> Unit:
        """Return the unit that gathers a slot."""
        return self._unit_of[slot]

    def logical(self, slot: ParamSlot) -> Tensor:
        """Return the logical parameter of a slot whose unit is gathered, assembled over the ranks of its
        split axis. A collective."""
        return whole(slot.leaf.detach(), slot.split, slot.split_axis)

    # ---- bookkeeping ------------------------------------------------------------------------

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, master weights and gradients that this rank holds between steps."""
        params = sum(flat.held_bytes for flat in self.flats)
        masters = sum(flat.master_bytes for flat in self.flats)
        return {
            "parameters": params,
            "master": masters,
            "gradients": sum(g.held_bytes for g in self.gradients),
        }

    def reshard_all(self) -> None:
        """Free all gathered parameters and idle buffers."""
        self.unsharder.end()
        for unit in self.units:
            unit.reshard()
        self.pool.clear()
