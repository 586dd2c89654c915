"""The engine's state on meta, without values: units, flat buffers, gradients, pool, unsharder and reducer.

The code of a real run decides what is allocated, kept and freed. Only the values are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from launcher.comm import Mesh
from launcher.config import Config
from launcher.engine.assemble import mark_leaves, units_of
from launcher.engine.offloading import open_placements
from launcher.engine.policy import axes_of, policy_of
from launcher.estimate.offloaded_bytes import OffloadedBytes, gradients_of, masters_of, on, parameters_of
from launcher.estimate.quantized import scale_bytes
from launcher.estimate.rank_part import RankPart
from launcher.estimate.states import StateBytes
from launcher.estimate.tiers import CountingTier
from launcher.offload.placement import Placement
from launcher.optim.sharded import step_in_turn
from launcher.optim.states import FlatState
from launcher.pipeline.schedules import schedule
from launcher.zero.apply import fill, lay_out
from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.hooks import Hooks, TrainingState
from launcher.zero.layout import LocalModel, ShardLayout
from launcher.zero.pool import BufferPool
from launcher.zero.reduce import Reducer, order_of_reduction
from launcher.zero.slot import ParamReader, ParamSlice, ParamSlot
from launcher.zero.unshard import Unsharder

META = torch.device("meta")


class SimulatedBuffer(FlatBuffer):
    """A flat buffer whose parameters are not attached to modules."""

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def make_leaf(self, slot: ParamSlot) -> None: ...

    def copy_in(self, read: ParamReader, span: slice, out: Tensor) -> None: ...


class SimulatedGradient(FlatGradient):
    """The gradient of a simulated buffer, whose leaves have no gradients.

    Attributes:
        collected: called when the leaves' gradients have been collected.
    """

    collected: Callable[[FlatGradient], None]

    def _move(self, full: Tensor, *, accumulate: bool) -> None: ...

    def collect(self) -> Tensor:
        full = super().collect()
        self.collected(self)
        return full


class SimulatedState(FlatState):
    """The offloaded optimizer state of a buffer, without an optimizer.

    Args:
        dtypes: dtypes of the states with a value for each element.
    """

    def __init__(self, gradient: FlatGradient, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__(gradient, {}, {})
        for key, dtype in dtypes.items():
            state = self._resting_of(key, dtype)
            state.allocate()
            state.write_back()
        self.shown = False

    def _give(self, piece: ParamSlice) -> None:
        piece.part.load()
        for state in self._resting.values():
            state.load()

    def _take_all(self) -> bool:
        return False


class SimulatedPool(BufferPool):
    """A buffer pool with a callback.

    Args:
        taken: called after each buffer taken from the pool.
    """

    def __init__(self, device: torch.device, taken: Callable[[], None]) -> None:
        super().__init__(device)
        take = self.take

        def take_and_tell(numel: int, dtype: torch.dtype) -> Tensor:
            buffer = take(numel, dtype)
            taken()
            return buffer

        self.take = take_and_tell


class SimulatedHooks(Hooks):
    """The hooks of modules and autograd, called by the replay of a trace."""

    def _register(self) -> None:
        self.packing.enabled = False
        self.arrival = {slot: self._arrival(unit) for unit in self.units for slot in unit.trainable_slots()}

    def begin_forward(self) -> None:
        """Run the hooks at the start of the model's forward."""
        self.abandon()
        self.unsharder.begin(with_grad=True)
        self.unsharder.use(self.root, "forward")

    def begin_backward(self) -> None:
        """Run the hooks at the start of the model's backward, unless it has already begun."""
        if self.state is not TrainingState.BACKWARD:
            self.state = TrainingState.BACKWARD
            self.enter_root()


class SimulatedRank:
    """The memory of one rank.

    Args:
        portion: the rank's part of the model.
        config: resolved configuration.
        mesh: this rank's mesh.
        states: bytes of optimizer states.
        on_host: the run computes on a CPU, in the memory that offloaded tensors are loaded into.

    Attributes:
        versions: number of weight versions, all held at once.
        live: bytes of activations and of gradients on leaves.
        peak: peak bytes on the device since `restart`; at_peak: the bytes of `pool` and `live` at that peak.
    """

    def __init__(
        self, portion: RankPart, config: Config, mesh: Mesh, states: StateBytes, *, on_host: bool = False
    ) -> None:
        model = portion.model
        mark_leaves(model, config)
        policy = replace(policy_of(config, model), compute_norm=False)  # there are no values
        self.disk = CountingTier()
        self.placements = open_placements(config, mesh, META, lambda path: self.disk, _on_meta)
        self.pool = SimulatedPool(META, self._look)
        axes = axes_of(config, mesh)
        blocks = units_of(model, portion.blocks)
        layout = ShardLayout(policy, axes, self.pool, self.placements, portion.expert_axes)
        parts = LocalModel(splits=portion.splits, experts=portion.experts, holders=portion.holders)
        self.units = list(lay_out(model, blocks, layout, parts, SimulatedBuffer, SimulatedGradient))
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.gradients = [gradient for unit in self.units for gradient in unit.gradients]
        for flat in self.flats:
            fill(flat, _never, from_rank_zero=False)
        for gradient in self.gradients:
            assert isinstance(gradient, SimulatedGradient)
            gradient.collected = self._taken_from_leaves
        self.unsharder = Unsharder(
            policy,
            self.placements.max_loaded_numel,
            self.placements.max_loaded_units,
            saves_memory=on_host and bool(self.placements.tiers),
        )
        self.reducer = Reducer(order_of_reduction(self.units), policy)
        self.hooks = SimulatedHooks(self.units, self.unsharder, self.reducer)
        self.unit_of = {unit.name: unit for unit in self.units}
        self.slots = {slot.name: slot for flat in self.flats for slot in flat.slots}
        self.gradient_of = {slot: g for g in self.gradients for slot in g.flat.slots}
        self.optimizer = states.of(self.gradients)
        moving = (one for one in self.gradients if one.flat.optim_placement.tier is not None)
        self._states = [SimulatedState(gradient, states.dtypes(gradient)) for gradient in moving]
        self._on_leaves: dict[ParamSlot, int] = {}
        self._in_place: set[ParamSlot] = set()
        self.live = self.peak = 0
        self.at_peak = (0, 0)
        self._fixed = 0
        self.versions = _versions(config, mesh)
        self._scales = scale_bytes(model)

    # ---- held memory ------------------------------------------------------------------------

    def kept(self) -> tuple[OffloadedBytes, OffloadedBytes, OffloadedBytes]:
        """Return the bytes of parameters, of gradients, and of optimizer states, by placement."""
        masters = masters_of(self.flats)
        masters.update(self.optimizer)
        parameters = parameters_of(self.flats)
        for placement in parameters:
            parameters[placement] *= self.versions
        parameters[Placement(META)] += self._scales
        return parameters, gradients_of(self.gradients), masters

    def fix(self) -> None:
        """Set the bytes held between steps, to which the pool and `live` add."""
        self._fixed = sum(on(META, held) for held in self.kept())

    # ---- changes ----------------------------------------------------------------------------

    def segment(self, peak: int, change: int) -> None:
        """Account for activations that are allocated and freed."""
        self._look(peak)
        self.live += change

    def gradient(self, name: str, nbytes: int, *, in_place: bool) -> None:
        """Account for the gradient of a parameter, and run its hook.

        Args:
            in_place: whether the gradient is added in place.
        """
        slot = self.slots.get(name)
        if slot is None or not slot.trainable:
            return
        if self._goes_in_place(slot, in_place):
            self._in_place.add(slot)
        elif nbytes and self.makes(name, in_place=False):
            self._on_leaves[slot] = nbytes
            self.live += nbytes
            self._look()
        self.hooks.arrival[slot](slot.leaf)

    def makes(self, name: str, *, in_place: bool) -> bool:
        """Return whether a gradient is a new tensor on its leaf."""
        slot = self.slots.get(name)
        if slot is None or not slot.trainable:
            return False
        has_one = slot in self._on_leaves or slot in self._in_place  # autograd accumulates into it
        return not (self.gradient_of[slot].adds_in_place or has_one or self._goes_in_place(slot, in_place))

    def _goes_in_place(self, slot: ParamSlot, in_place: bool) -> bool:
        return in_place and self.gradient_of[slot].place(slot) is not None

    def step(self) -> None:
        """Run the optimizer step for offloaded states."""
        batches = ([state] for state in self._states)
        for pending in step_in_turn(batches, _use, _not_in_halves, ahead=self.placements.reads_ahead):
            pending.wait()
        self.placements.buffers.wait_for_writes()

    def finish_step(self) -> None:
        """End a step: memory that is still held is held between steps."""
        for gradient in self.gradients:
            gradient.zero()
        self._on_leaves.clear()
        self._in_place.clear()
        self.live = 0
        self.fix()

    def restart(self) -> None:
        """Reset the peak to the current value."""
        self.peak = 0
        self._look()

    def _look(self, above: int = 0) -> None:
        pool, live = self.pool.held_bytes, self.live + above
        if self._fixed + pool + live > self.peak:
            self.peak, self.at_peak = self._fixed + pool + live, (pool, live)

    def _taken_from_leaves(self, gradient: FlatGradient) -> None:
        self._look()
        for slot in gradient.flat.slots:
            self.live -= self._on_leaves.pop(slot, 0)
            self._in_place.discard(slot)


def _versions(config: Config, mesh: Mesh) -> int:
    """Return how many versions of the weights are held: more than one only in asynchronous training."""
    pp, section = mesh.axes["pp"], config.pipeline
    if pp.degree == 1 or not section.asynchronous:
        return 1
    number = int(str(config.gradient_accumulation_steps))
    made = schedule(section.schedule, pp.degree, number, section.chunks_of_rank)
    return made.weight_versions[pp.rank]


def _use(gradient: FlatGradient) -> bool:
    """Load the owned shard for the optimizer step; return False, since nothing is written."""
    _ = gradient.owned
    return False


def _not_in_halves(gradients: Sequence[FlatGradient]) -> None: ...


def _never(name: str, start: int, stop: int) -> Tensor:
    raise AssertionError(f"unexpected copy of {name}")


def _on_meta(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=META)
