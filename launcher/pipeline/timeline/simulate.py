"""Simulates a schedule with given costs, without a model. A `Timeline` is also used for measured runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from launcher.errors import LauncherError
from launcher.pipeline.schedules.actions import (
    GIVES_INPUT_GRADIENT,
    Action,
    ActionKind,
    PipelineSchedule,
    dependencies,
    needs,
    walk,
)


@dataclass(frozen=True)
class MicrobatchCosts:
    """The costs of one microbatch, in any unit of time.

    Args:
        forward, input, weight: F, I and W of each virtual stage; a B takes I + W.
        transfer: time from the end of an action until its result is available on another rank.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float = 0

    @classmethod
    def even(
        cls, virtual_stages: int, forward: float, input: float, weight: float, transfer: float = 0
    ) -> MicrobatchCosts:
        """Return equal costs for all virtual stages."""
        return cls(
            (forward,) * virtual_stages, (input,) * virtual_stages, (weight,) * virtual_stages, transfer
        )

    @classmethod
    def measured(cls, timeline: Timeline) -> MicrobatchCosts:
        """Return the mean measured costs of each virtual stage; a full backward counts as I, with a W of 0.

        Time that an action spent waiting (for a busy device) is included. The transfer is the median over the
        transfers that a rank was idle for.
        """
        taken: dict[tuple[ActionKind, int], list[float]] = {}
        for spans in timeline.spans:
            for span in spans:
                taken.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)

        def mean(*kinds: ActionKind) -> tuple[float, ...]:
            """Return, for each virtual stage, the mean over all its actions of these kinds."""
            found = [
                [t for kind in kinds for t in taken.get((kind, stage), ())]
                for stage in range(timeline.virtual_stages)
            ]
            return tuple(sum(times) / max(1, len(times)) for times in found)

        return cls(
            mean(ActionKind.FORWARD),
            mean(*GIVES_INPUT_GRADIENT),
            mean(ActionKind.WEIGHT),
            _transfer(timeline),
        )

    def of(self, action: Action) -> float:
        """Return the cost of a compute action."""
        stage = action.stage
        if action.kind is ActionKind.FORWARD:
            return self.forward[stage]
        if action.kind is ActionKind.BACKWARD:
            return self.input[stage] + self.weight[stage]
        return self.input[stage] if action.kind is ActionKind.INPUT else self.weight[stage]


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of all actions of a step.

    Args:
        name, stages, chunks, microbatches: of the schedule.
        spans: spans of each rank, in execution order.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    spans: tuple[tuple[Span, ...], ...]

    @property
    def virtual_stages(self) -> int:
        """Return P * v."""
        return self.stages * self.chunks

    @cached_property
    def start(self) -> float:
        """Return when the first action started."""
        return min(span.start for spans in self.spans for span in spans)

    @cached_property
    def total(self) -> float:
        """Return the time from the start of the first action to the end of the last."""
        return max(span.end for spans in self.spans for span in spans) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Return the compute time of each rank."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Return the fraction of the total time in which ranks are idle, averaged over ranks: 0 to 1."""
        return 1 - sum(self.busy) / (self.stages * self.total) if self.total else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Return the ratio of idle to busy time: the (p-1)/m of the papers."""
        return self.stages * self.total / sum(self.busy) - 1 if sum(self.busy) else 0.0

    def held(self, rank: int) -> list[tuple[float, int]]:
        """Return (time, activations held from then on); each is held from the start of F to the end of B or
        I."""
        changes = [(span.start, 1) for span in self.spans[rank] if span.action.kind is ActionKind.FORWARD]
        changes += [(span.end, -1) for span in self.spans[rank] if span.action.kind in GIVES_INPUT_GRADIENT]
        curve, count = [], 0
        for time, change in sorted(changes):  # at equal times, ends (-1) sort before starts
            count += change
            curve.append((time, count))
        return curve

    @cached_property
    def peak_held(self) -> tuple[int, ...]:
        """Return the peak number of (virtual stage, microbatch) activations that each rank holds."""
        return tuple(max((count for _, count in self.held(rank)), default=0) for rank in range(self.stages))


def _transfer(timeline: Timeline) -> float:
    """Return the median time from the end of an action to the start of its dependent action on another rank,
    where that rank was idle in between."""
    ended = {span.action: (rank, span.end) for rank, spans in enumerate(timeline.spans) for span in spans}
    waits = []
    for rank, spans in enumerate(timeline.spans):
        for before, span in pairwise(spans):
            for needed in needs(span.action, timeline.virtual_stages, ended):
                holder, end = ended.get(needed, (rank, 0.0))
                if holder != rank and before.end < end <= span.start:
                    waits.append(span.start - end)
    return median(waits) if waits else 0.0


def simulate(
    schedule: PipelineSchedule, costs: MicrobatchCosts, delays: Mapping[Action, float] | None = None
) -> Timeline:
    """Simulate a schedule with given costs.

    Each rank runs its list in order. An action starts when its rank is free and its inputs have arrived;
    sends cost the sender nothing.

    Args:
        schedule: the actions of each rank.
        costs: costs of each virtual stage.
        delays: extra time of individual actions.

    Raises:
        LauncherError: the schedule deadlocks, or the costs are for another number of virtual stages.
    """
    if {len(costs.forward), len(costs.input), len(costs.weight)} != {schedule.virtual_stages}:
        raise LauncherError(
            f"costs for {len(costs.forward)} virtual stages, but the schedule has {schedule.virtual_stages}"
        )
    needed_by = dependencies(schedule)
    order, stuck = walk(schedule, needed_by)
    if stuck:
        raise LauncherError(
            f"{schedule.name} deadlocks", fix="call pipeline.schedules.check.check to find out where"
        )
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ended: dict[Action, float] = {}
    for rank, action in order:
        start = spans[rank][-1].end if spans[rank] else 0.0
        for needed in needed_by[action]:
            away = schedule.rank_of[needed.stage] != rank
            start = max(start, ended[needed] + (costs.transfer if away else 0))
        ended[action] = start + costs.of(action) + (delays.get(action, 0.0) if delays else 0.0)
        spans[rank].append(Span(action, start, ended[action]))
    return Timeline(
        schedule.name,
        schedule.stages,
        schedule.chunks,
        schedule.microbatches,
        tuple(tuple(of_rank) for of_rank in spans),
    )
