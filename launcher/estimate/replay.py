"""Replay of one rank's step: the actions of the schedule, with memory traces in place of computation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from launcher.comm import Mesh
from launcher.config import Config
from launcher.engine.gradient_plan import GradientPlan
from launcher.estimate.answer import PHASES
from launcher.estimate.memory_trace import (
    BlockTrace,
    Items,
    TraceEvent,
    TraceMark,
    TraceSegment,
    absolute,
    change_of,
)
from launcher.estimate.model_trace import ModelTrace
from launcher.estimate.rank_part import RankPart
from launcher.estimate.simulated import SimulatedRank
from launcher.pipeline.executor.action_loop import run_actions
from launcher.pipeline.executor.stage_p2p import AHEAD
from launcher.pipeline.schedules import ONE_STAGE, schedule
from launcher.pipeline.schedules.actions import Action
from launcher.pipeline.schedules.transfers import actions_of

MICROBATCHES = 2  # without pipeline stages, later ones behave like the second


@dataclass(frozen=True)
class StepScript:
    """The actions of a rank in a step.

    Args:
        traced: block index -> trace, which depends on whether the block is recomputed.
        ends: trace for the modules before and after the blocks.
    """

    rank: SimulatedRank
    portion: RankPart
    config: Config
    mesh: Mesh
    traced: Callable[[int], ModelTrace]
    ends: ModelTrace

    def actions(self, most: int) -> tuple[Action, ...]:
        """Return the actions in order.

        Args:
            most: without pipeline stages, return only the last `most` microbatches.
        """
        pp, section = self.mesh.axes["pp"], self.config.pipeline
        number = int(str(self.config.gradient_accumulation_steps))
        if pp.degree == 1:
            return actions_of(schedule(ONE_STAGE, 1, number, 1), 0)[-2 * most :]
        return actions_of(schedule(section.schedule, pp.degree, number, section.chunks_of_rank), pp.rank)


class ScriptedStep:
    """One step of a script; implements `StageActions` by changes in memory.

    Attributes:
        peaks: peak bytes of each phase.
        at_peak: (bytes of buffers, bytes of activations) at the highest peak.
    """

    def __init__(self, script: StepScript) -> None:
        self.script, self.rank = script, script.rank
        self.peaks, self.at_peak = dict.fromkeys(PHASES, 0), (0, 0)
        self._phase = PHASES[-1]
        self._staged = script.mesh.axes["pp"].degree > 1
        self._plan = GradientPlan.of(script.config.pipeline, is_whole=not self._staged)
        self._last_stage = len(script.portion.rank_of) - 1

    def run(self, most: int = MICROBATCHES) -> None:
        """Replay the forwards and backwards of all microbatches, and the optimizer step.

        Args:
            most: see `StepScript.actions`.
        """
        rank = self.rank
        rank.fix()
        rank.restart()
        if self._staged:
            buffers = self._receive_buffers()
            rank.segment(buffers, buffers)
        with self._plan.of_step(rank.unsharder, rank.reducer):
            run_actions(self.script.actions(most), self)
        self._enter(PHASES[2])
        rank.live = 0
        rank.restart()
        rank.step()
        self._enter(PHASES[2])
        rank.finish_step()

    # ---- actions ----------------------------------------------------------------------------

    def around(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, action: Action) -> None:
        rank, hidden, stage = self.rank, self.script.ends.hidden, action.stage
        self._enter(PHASES[0])
        rank.hooks.begin_forward()
        if stage == 0:
            self._play(self.script.ends.trace.before.forward)
        else:
            rank.segment(hidden, hidden)
        for block in self._blocks(stage):
            self._play(self._piece(block).forward, block)
        if stage == self._last_stage:
            self._play(self.script.ends.trace.after.forward)
        # The trace frees the forward's local variables at its end; in a pipeline, the first stage frees them.
        rank.segment(0, ((stage == self._last_stage) - (stage == 0)) * self.script.ends.local)
        if stage == self._last_stage:
            return
        rank.segment(0, -hidden)
        rank.unsharder.end()

    def backward(self, action: Action, *, last: bool, late: bool = False) -> None:
        """See `StageActions`.

        Args:
            late: whether weight gradients are deferred.
        """
        rank, hidden, stage = self.rank, self.script.ends.hidden, action.stage
        self._begin_backward(self.script.portion.names_of(stage), last)
        rank.hooks.begin_backward()
        if stage == self._last_stage:
            ends = self.script.ends
            self._play((ends.late if late and ends.late else ends.trace).after.backward)
        else:
            rank.segment(hidden, hidden)
        for block in reversed(self._blocks(stage)):
            self._play(self._piece(block, late=late).backward, block)
        rank.hooks.end_backward()
        if stage:
            rank.segment(0, -hidden)

    def input_backward(self, action: Action) -> None:
        self.backward(action, last=False, late=True)

    def weight_backward(self, action: Action, *, last: bool) -> None:
        rank = self.rank
        self._begin_backward((), last)
        in_place = not rank.reducer.plan.reduces
        gradients, held = self._put_off(action.stage)
        new = sum(nbytes for name, nbytes in gradients if rank.makes(name, in_place=in_place))
        rank.segment(new, -held)
        rank.hooks.begin_backward()
        for name, nbytes in gradients:
            rank.gradient(name, nbytes, in_place=in_place)
        rank.hooks.end_backward()

    def update(self, action: Action) -> None:
        """Do nothing: all versions of the weights are allocated from the start."""

    def receive(self, action: Action) -> None:
        """Do nothing: all receive buffers are allocated from the start."""

    def send(self, action: Action) -> None:
        """Do nothing: `forward` and `backward` have already freed the sent tensor."""

    # ---- backward ---------------------------------------------------------------------------

    def _begin_backward(self, blocks: Collection[str] | None, last: bool) -> None:
        self._enter(PHASES[1])
        self._plan.begin_backward(self.rank.reducer, blocks, last=last)

    def _put_off(self, stage: int) -> tuple[list[tuple[str, int]], int]:
        """Return the weight gradients that the input backward has deferred.

        Returns:
            (parameter, bytes of its gradient) for each, and the bytes held until now to compute them.
        """
        pairs: list[tuple[BlockTrace, BlockTrace, int]] = [
            (self._piece(block), self._piece(block, late=True), block) for block in self._blocks(stage)
        ]
        ends = self.script.ends
        if stage == self._last_stage and ends.late is not None:
            pairs.append((ends.trace.after, ends.late.after, -1))
        gradients: list[tuple[str, int]] = []
        held = 0
        for now, later, block in pairs:
            came = {item.name for item in later.backward if isinstance(item, TraceMark) and item.nbytes}
            gradients += [
                (absolute(item, self._name(block)), item.nbytes)
                for item in now.backward
                if isinstance(item, TraceMark) and item.event is TraceEvent.GRADIENT and item.name not in came
            ]
            held += change_of(later.backward) - change_of(now.backward)
        return gradients, held

    # ---- traces -----------------------------------------------------------------------------

    def _play(self, items: Items, block: int = -1) -> None:
        rank, name = self.rank, self._name(block)
        for item in items:
            if isinstance(item, TraceSegment):
                rank.segment(item.peak, item.change)
                continue
            whole = absolute(item, name)
            if item.event is TraceEvent.GRADIENT:
                rank.gradient(whole, item.nbytes, in_place=item.own and not rank.reducer.plan.reduces)
                continue
            unit = rank.unit_of.get(whole)
            if unit is None or not unit.sharded:
                continue
            if item.event is TraceEvent.USE:
                rank.unsharder.use(unit, "forward")
            elif item.event is TraceEvent.LEAVE:
                rank.unsharder.leave(unit)
            elif item.event is TraceEvent.ENTER:
                rank.hooks.enter_backward(unit)

    def _blocks(self, stage: int) -> range:
        boundaries = self.script.portion.boundaries
        return range(boundaries[stage], boundaries[stage + 1])

    def _piece(self, block: int, *, late: bool = False) -> BlockTrace:
        return self.script.traced(block).of(block, late=late)

    def _name(self, block: int) -> str:
        return "" if block < 0 else self.script.portion.names[block]

    def _receive_buffers(self) -> int:
        """Return the bytes of the buffers for messages that are received ahead of time."""
        pp = self.script.mesh.axes["pp"]
        kinds = (pp.rank > 0) + (pp.rank < pp.degree - 1)
        number = min(AHEAD, int(str(self.script.config.gradient_accumulation_steps)))
        return kinds * number * self.script.ends.hidden

    def _enter(self, phase: str) -> None:
        rank = self.rank
        if rank.peak > max(self.peaks.values()):
            self.at_peak = rank.at_peak
        self.peaks[self._phase] = max(self.peaks[self._phase], rank.peak)
        self._phase = phase
        rank.restart()
