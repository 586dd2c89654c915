"""`zero.apply`: from a model to a model whose parameters live in flat buffers, sharded as the policy says."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from launcher.comm import Axis, all_reduce
from launcher.errors import ElsewhereError, LauncherError
from launcher.monitor.memory import trim_malloc
from launcher.offload.placement import Placements
from launcher.tensor.assemble import whole
from launcher.tensor.split import Split
from launcher.zero.axes import ShardAxes
from launcher.zero.checks import StepChecks
from launcher.zero.copies import check_copies
from launcher.zero.edits import ParameterEdits
from launcher.zero.fetch import Fetcher
from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.hooks import Hooks
from launcher.zero.layout import assign_units, choose_placements
from launcher.zero.leaf import with_leaves
from launcher.zero.module_apply import GatheringApply
from launcher.zero.partitioned import Partitioner, is_dealt
from launcher.zero.policy import ZeroPolicy
from launcher.zero.pool import BufferPool
from launcher.zero.reduce import Reducer, order_of_reduction
from launcher.zero.sharded_parameter import ShardedParameter
from launcher.zero.shared import sum_over_stages, sum_partial, use_over_stages
from launcher.zero.slot import ParamSlice, ParamSlot
from launcher.zero.source import MadeOnMeta, ModelValues, ParamSource
from launcher.zero.unit import Unit
from launcher.zero.user_gradients import (
    ClaimedLeaves,
    follow_torch,
    refuse_uneven_discard,
    warn_of_discard_once,
)

_NO_SPLITS: Mapping[str, Split] = MappingProxyType({})
_ALONE: Mapping[str, Axis] = MappingProxyType({})
_NONE: Mapping[Tensor, str] = MappingProxyType({})
_live: weakref.WeakSet[ZeroModel] = weakref.WeakSet()


def live_models() -> list[ZeroModel]:
    """Every model under ZeRO in this process, oldest first."""
    return sorted(_live, key=lambda model: model.serial)


class ZeroModel:
    """A model under ZeRO: its units, and what the engine, the optimizer and checkpoints ask of them.

    Args:
        module: the user's model, unchanged but for where its parameters live.
        policy: what is sharded.
        axes: dp, and along which axis of it is sharded.
        units: root unit last.
        tp: along it parameters are split; each of its ranks has a ZeRO run of its own over what it holds.
        pp: along it the model is cut into stages; the same of its ranks.
        elsewhere: parameters of the model that only other stages hold -> where they are, in words.
        placements: where shards rest.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: ZeroPolicy,
        axes: ShardAxes,
        units: list[Unit],
        pool: BufferPool,
        tp: Axis,
        pp: Axis,
        elsewhere: Mapping[Tensor, str] = _NONE,
        placements: Placements | None = None,
    ) -> None:
        self.placements = placements or Placements(pool.device)
        self.module, self.policy, self.axes, self.units, self.pool = module, policy, axes, units, pool
        self.axis, self.tp, self.pp, self.elsewhere = axes.dp, tp, pp, elsewhere
        self._copies_checked = False
        self.flats: list[FlatBuffer] = [flat for unit in units for flat in unit.flats]
        self.gradients: list[FlatGradient] = [gradient for unit in units for gradient in unit.gradients]
        self._gradient_of = {gradient.flat: gradient for gradient in self.gradients}
        self.fetcher = Fetcher(
            policy, self.placements.ahead, self.placements.units_ahead, spares=self.placements.one_memory
        )
        self.reducer = Reducer(order_of_reduction(units), policy)
        self.hooks = Hooks(units, self.fetcher, self.reducer)
        self.hooks.keeps = self  # while modules call the hooks
        self.slots: dict[str, ParamSlot] = {slot.name: slot for flat in self.flats for slot in flat.slots}
        self._slot_of_parameter = {id(slot.leaf): slot for slot in self.slots.values()}
        hidden = [slot.leaf for g in self.gradients if not g.shows for slot in g.flat.slots]
        watched = [slot.leaf for flat in self.flats if flat.own_master for slot in flat.slots]
        self.hooks.add_removable(ClaimedLeaves(hidden, watched))
        self.edits = ParameterEdits(self.flats)
        follow_torch(live_models)
        self.serial: int = max((model.serial for model in _live), default=0) + 1
        _live.add(self)
        self._unit_of = {slot: unit for unit in units for flat in unit.flats for slot in flat.slots}
        self.checks = self.hooks.add_removable(StepChecks(self)) if policy.checks else None
        if policy.apply_gathers and any(unit.sharded for unit in units):
            self.hooks.add_removable(GatheringApply(self))

    # ---- slices -----------------------------------------------------------------------------

    def slices(self) -> list[ParamSlice]:
        """What this rank owns of every parameter, as parts of the master weights."""
        return [piece for flat in self.flats for piece in flat.slices()]

    def written_slices(self) -> list[ParamSlice]:
        """What this rank writes into a checkpoint: the pieces of all ranks of dp together cover every local parameter
        once. What several tp ranks hold is in the pieces of each; its split says who is the first of them. What several
        pipeline stages hold is in those of the first one."""
        if self.axes.replicate.rank > 0:  # the first shard group writes for all
            return []
        flats = [flat for flat in self.flats if flat.slots[0].holders.rank == 0]
        return [piece for flat in flats for piece in flat.slices(span=flat.shard_span)]

    def publish(self) -> None:
        """Bring changed master weights into every rank's parameters."""
        for pending in [pending for flat in self.flats for pending in flat.publish()]:
            pending.wait()

    def rest(self) -> None:
        """Let go of what was looked at and has not changed, where it rests elsewhere."""
        for flat in self.flats:
            flat.rest()

    # ---- gradients --------------------------------------------------------------------------

    def place_of_gradient(self, leaf: Tensor) -> Tensor | None:
        """Where its gradients are added up: `FlatGradient.place`."""
        slot = self._slot_of_parameter.get(id(leaf))
        return None if slot is None else self._gradient_of[slot.flat].place(slot)

    def norm_and_use(self, more: Tensor | None = None) -> tuple[Tensor, list[bool], Tensor]:
        """Sum of squares of the reduced gradient over all ranks (fp64 scalar), which trainable slots got one, and the
        sum of `more` over dp and tp.

        Once a step: partial gradients become sums here. One collective along dp and tp for all answers. Marks slots
        unused everywhere as unused, and the others as used.

        Args:
            more: fp64 [n], what this rank adds.
        """
        if not self._copies_checked:
            check_copies(self.gradients, self.axis, self.tp)
            self._copies_checked = True
        for gradient in self.gradients:
            gradient.sync_with_leaves()
        sum_partial(self.gradients, self.tp, self.pool.device)
        sum_over_stages(self.gradients)
        if self.checks is not None:
            self.checks.compare()
        slots = [slot for gradient in self.gradients for slot in gradient.flat.slots]
        squares = torch.zeros((), dtype=torch.float64)
        if self.policy.compute_norm:
            for gradient in self.gradients:  # every shard group has all of it
                squares += gradient.squares() / self.axes.replicate.degree
                gradient.rest()
        flags = [*(slot.used for slot in slots), any(gradient.discarded for gradient in self.gradients)]
        used = torch.tensor(flags, dtype=torch.float64)
        report = torch.cat([squares.reshape(1).cpu(), used]).to(self.pool.device)
        if more is not None:
            report = torch.cat([report, more])
        for axis in (self.axis, self.tp):
            all_reduce(report, axis, "root/norm").wait()
        if self.policy.compute_norm:
            all_reduce(report[:1], self.pp, "root/norm").wait()
        used, more = report[1 : 1 + len(slots)], report[2 + len(slots) :]
        refuse_uneven_discard(int(report[1 + len(slots)]), self.axis.degree * self.tp.degree)
        use_over_stages(slots, used)
        self.reducer.measured = True
        flags = [bool(count) for count in used.tolist()]
        for slot, flag in zip(slots, flags, strict=True):
            slot.used = flag
        return report[0], flags, more

    @property
    def mean_divisor(self) -> float:
        """Reduced gradients divided by this are the mean over ranks."""
        divided = self.policy.predivide
        return 1.0 if divided is None else self.axis.degree / divided

    @property
    def sum_divisor(self) -> float:
        """Reduced gradients divided by this are the sum over ranks."""
        return self.mean_divisor / self.axis.degree

    def zero_grad(self) -> None:
        """Forget the gradients of a step that is over on every rank."""
        self.hooks.abandon()
        self.hooks.kinds.clear()
        self.reducer.measured = False
        for gradient in self.gradients:
            gradient.zero()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Throw away what is kept of the gradients of those parameters that are this model's."""
        found = (self.find_slot(parameter) for parameter in parameters)
        self._forget({slot for slot in found if slot is not None})

    def discard(self) -> None:
        """`forget` the gradients of all parameters: the user's `zero_grad()`."""
        self._forget({slot for gradient in self.gradients for slot in gradient.flat.slots})

    def _forget(self, slots: set[ParamSlot]) -> None:
        if not slots:
            return
        if not self.reducer.plan.last and any(gradient.kept for gradient in self.gradients):
            warn_of_discard_once(self.axis.rank)
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:  # a hook of the user's may call, and then the backward goes on
            self.hooks.abandon()
        for gradient in self.gradients:
            if of_buffer := slots.intersection(gradient.flat.slots):
                gradient.forget(of_buffer, reduced=not self.reducer.holds_local(gradient))
        if not any(gradient.kept for gradient in self.gradients):
            self.hooks.kinds.clear()
            self.reducer.measured = False

    # ---- whole parameters -------------------------------------------------------------------

    @contextmanager
    def gathered(
        self, parameters: Iterable[Tensor] | None = None, modifier_rank: int | None = None
    ) -> Iterator[None]:
        """Full local parameters inside the `with`, on every rank; a collective of dp.

        Args:
            parameters: which (their units are gathered); default: all.
            modifier_rank: this dp rank's edits of `parameters` are kept and sent to all; None: edits to sharded
                parameters are lost.
        """
        slots = self._slots_of(parameters)
        units = list(dict.fromkeys(self._unit_of[slot] for slot in slots if slot.flat.sharded))
        opened = [unit for unit in units if not unit.is_unsharded]
        for unit in opened:
            unit.unshard("gather")
        for unit in opened:
            unit.wait_for_unshard()
            unit.held = True
        try:
            yield
            if modifier_rank is not None:
                for slot in slots:
                    slot.flat.take_back(slot, modifier_rank)
        finally:
            for unit in opened:
                unit.held = False
                self.fetcher.reshard(unit)

    def _slots_of(self, parameters: Iterable[Tensor] | None) -> list[ParamSlot]:
        if parameters is None:
            return list(self.slots.values())
        slots = [self.slot_of(parameter) for parameter in parameters]
        return list(dict.fromkeys(slot for slot in slots if slot is not None))

    def slot_of(self, parameter: Tensor) -> ParamSlot | None:
        """The slot of a parameter (leaf or handle) of this model; None for any other tensor.

        Raises:
            ElsewhereError: it was a parameter of the model, and another pipeline stage has it now.
        """
        if (where := self.elsewhere.get(parameter)) is not None:
            raise ElsewhereError(
                f"{where}, and this rank is stage {self.pp.rank}",
                fix="name on each rank parameters of its own stage: engine.module.named_parameters()",
            )
        return self.find_slot(parameter)

    def find_slot(self, parameter: Tensor) -> ParamSlot | None:
        """`slot_of`, but for a parameter of another stage: None."""
        if isinstance(parameter, ShardedParameter):  # a copy of a handle (its .data) knows the slot, too
            holder = parameter.zero_holder
            return holder if isinstance(holder, ParamSlot) and holder in self._unit_of else None
        return self._slot_of_parameter.get(id(parameter))

    def unit_of(self, slot: ParamSlot) -> Unit:
        """The unit that a slot is gathered with."""
        return self._unit_of[slot]

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every logical parameter of this pipeline stage, one unit gathered at a time. A collective of its ranks: all
        iterate to the end."""
        for unit in self.units:
            names = [slot for flat in unit.flats for slot in flat.slots]
            with self.gathered([slot.leaf for slot in names]):
                for slot in names:
                    yield slot.name, self.logical(slot)

    def logical(self, slot: ParamSlot) -> Tensor:
        """The logical parameter of a slot whose unit is gathered: all that the tp ranks hold of it. A collective."""
        return whole(slot.leaf.detach(), slot.split, self.tp)

    # ---- bookkeeping ------------------------------------------------------------------------

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds between steps: as parameters, master weights and gradients."""
        params = sum(flat.held_bytes for flat in self.flats)
        masters = sum(flat.master_bytes for flat in self.flats)
        return {
            "parameters": params,
            "master": masters,
            "gradients": sum(g.held_bytes for g in self.gradients),
        }

    def reshard_all(self) -> None:
        """Free every gathered parameter, and the idle buffers."""
        self.fetcher.end()
        for unit in self.units:
            unit.reshard()
        self.pool.clear()


def apply(
    module: nn.Module,
    axes: ShardAxes,
    policy: ZeroPolicy,
    *,
    device: torch.device,
    blocks: list[tuple[str, nn.Module]],
    source: ParamSource | None = None,
    splits: Mapping[str, Split] = _NO_SPLITS,
    tp: Axis | None = None,
    pp: Axis | None = None,
    holders: Mapping[str, Axis] = _ALONE,
    elsewhere: Mapping[Tensor, str] = _NONE,
    placements: Placements | None = None,
) -> ZeroModel:
    """Move the parameters of `module` into flat buffers.

    Args:
        module: any nn.Module; parameters may be on meta when `source` makes them. They are local.
        axes: the data-parallel axis, and along which axis of it is sharded.
        policy: what is sharded, in which dtypes.
        device: where the flat buffers live.
        blocks: modules that are units (name, module), but for leaves; the rest of the model is the root unit.
        source: the first values; default: what the module holds, rank 0's for all.
        splits: which elements of logical parameters the module holds, by name; default: all of them.
        tp: the axis that they are split along.
        pp: the axis along which the model is cut into stages.
        holders: the stages that hold a parameter, by name, where there are several.
        elsewhere: parameters that only other stages hold -> where they are, in words.
        placements: where shards rest; default: in the memory of the device.
    """
    source = source or ModelValues()
    placements = placements or Placements(device)
    pool = BufferPool(device, placements.buffers.idle if placements.one_memory else None)
    units = []
    for unit in lay_out(module, axes, policy, blocks, splits, holders, placements, pool):
        for flat in unit.flats:
            with source.open(flat.slots) as read:
                flat.fill(read, from_rank_zero=isinstance(source, ModelValues))
        units.append(unit)
        if placements.one_memory:
            trim_malloc()  # what the values took before
    if isinstance(source, MadeOnMeta):
        source.make_buffers(device)
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device:
                owner._buffers[key] = buffer.to(device)
    return ZeroModel(
        module, policy, axes, units, pool, tp or Axis("tp"), pp or Axis("pp"), elsewhere, placements
    )


def lay_out(
    module: nn.Module,
    axes: ShardAxes,
    policy: ZeroPolicy,
    blocks: list[tuple[str, nn.Module]],
    splits: Mapping[str, Split],
    holders: Mapping[str, Axis],
    placements: Placements,
    pool: BufferPool,
    buffer: type[FlatBuffer] = FlatBuffer,
    gradient: type[FlatGradient] = FlatGradient,
) -> Iterator[Unit]:
    """The units of a model with their flat buffers, one after the other; the root unit comes last.

    Args:
        buffer, gradient: what they are made of.
    """
    cut = placements.cut * axes.shard.degree
    units = with_leaves(module, blocks) if policy.shard_params else blocks
    planning = assign_units(module, units, policy, splits, holders, cut)
    chosen = choose_placements(planning, placements, policy, axes.shard.degree)
    for planned in planning:
        flats = []
        for i, group in enumerate(planned.groups):
            params_placement, optim_placement = next(chosen)
            flats.append(
                buffer(
                    planned.name if len(planned.groups) == 1 else f"{planned.name}.{i}",
                    group.slots,
                    group.dtype,
                    sharded=group.sharded,
                    policy=policy,
                    axes=axes,
                    pool=pool,
                    placements=placements,
                    params_placement=params_placement,
                    optim_placement=optim_placement,
                )
            )
        yield Unit(planned.name, planned.module, flats, policy, gradient)


def release(model: nn.Module) -> None:
    """Give a model back as it was, for another engine: no hooks; what was sharded is dealt out. A collective.

    Raises:
        LauncherError: layers are split over tp, or the model is cut into stages: it is not what it was.
    """
    earlier = [zero for zero in live_models() if any(zero.slot_of(p) is not None for p in model.parameters())]
    handles = [p for p in model.parameters() if isinstance(p, ShardedParameter) and not is_dealt(p)]
    slots = [handle.zero_holder for handle in handles if isinstance(handle.zero_holder, ParamSlot)]
    if any(zero.pp.degree > 1 for zero in earlier) or not all(slot.split.is_whole for slot in slots):
        raise LauncherError(
            "the model is split already, by an earlier initialize() of it",
            where="initialize(model=...)",
            fix="build the model again, or keep the first engine",
        )
    for zero in earlier:
        zero.hooks.remove()
        zero.reshard_all()
        _live.discard(zero)
    dealer = Partitioner()
    for flat in dict.fromkeys(slot.flat for slot in slots):
        flat.unshard("gather")
        flat.wait_for_unshard()
        dealt = [(slot, dealer.handle(slot.leaf, slot.name)) for slot in flat.slots]
        flat.reshard()
        for slot, handle in dealt:
            slot.show(handle)
    for zero in earlier:
        zero.placements.close()
