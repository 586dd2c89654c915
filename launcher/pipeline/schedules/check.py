"""Checks that a schedule can run. Every schedule is checked once, before it first runs."""

from __future__ import annotations

from collections import Counter

from launcher.errors import LauncherError
from launcher.pipeline.schedules.actions import (
    GIVES_INPUT_GRADIENT,
    Action,
    ActionKind,
    PipelineSchedule,
    dependencies,
    walk,
)


def check(schedule: PipelineSchedule) -> None:
    """Check that each action occurs once, on its rank, after its dependencies, within the declared memory.

    Ranks are assumed to run their lists in order, to wait for receives, and not to wait for sends. A schedule
    without any backward is an evaluation, which holds no activations.

    Raises:
        LauncherError: the schedule cannot run; the message contains rank, action and what is missing.
    """
    trains = any(action.kind is not ActionKind.FORWARD for actions in schedule.actions for action in actions)
    _complete(schedule, trains)
    _ordered(schedule)
    for rank in range(schedule.stages if trains else 0):
        _within(schedule, rank)


def _complete(schedule: PipelineSchedule, trains: bool) -> None:
    """Check that each rank has exactly the F and B (or I and W) of all its virtual stages and
    microbatches."""
    for rank, actions in enumerate(schedule.actions):
        counts = Counter(actions)
        expected = _expected(schedule, rank, counts, trains)
        for action, count in counts.items():
            if count > 1:
                raise _error(schedule, rank, f"{action} occurs {count} times")
            if action not in expected:
                raise _error(schedule, rank, f"{action} does not belong on this rank")
        for action in expected:
            if action not in counts:
                raise _error(schedule, rank, f"{action} is missing")


def _expected(
    schedule: PipelineSchedule, rank: int, there: Counter[Action], trains: bool
) -> dict[Action, None]:
    """Return the actions that the rank must have. A backward is split if either of its halves occurs."""
    expected: dict[Action, None] = {}
    for stage in schedule.stages_of(rank):
        for microbatch in range(schedule.microbatches):
            halves = [Action(kind, stage, microbatch) for kind in (ActionKind.INPUT, ActionKind.WEIGHT)]
            split = any(half in there for half in halves)
            backward = halves if split else [Action(ActionKind.BACKWARD, stage, microbatch)]
            forward = Action(ActionKind.FORWARD, stage, microbatch)
            expected |= dict.fromkeys([forward, *backward] if trains else [forward])
    return expected


def _ordered(schedule: PipelineSchedule) -> None:
    needs = dependencies(schedule)
    order, stuck = walk(schedule, needs)
    done = {action for _, action in order}
    waits = []
    for rank, action in stuck.items():
        missing = next(needed for needed in needs[action] if needed not in done)
        holder = schedule.rank_of[missing.stage]
        if holder == rank:
            raise _error(schedule, rank, f"{action} comes before {missing}, on which it depends")
        waits.append(f"rank {rank} waits at {action} for {missing} of rank {holder}")
    if waits:
        raise LauncherError(f"{schedule.name}: deadlock: " + "; ".join(waits), where=_where(schedule))


def _within(schedule: PipelineSchedule, rank: int) -> None:
    held = deferred = 0
    for action in schedule.actions[rank]:
        held += action.kind is ActionKind.FORWARD
        deferred += action.kind is ActionKind.INPUT
        for what, count, promised in (
            ("activations", held, schedule.held[rank]),
            ("deferred weight gradients", deferred, schedule.deferred[rank]),
        ):
            if count > promised:
                raise _error(
                    schedule,
                    rank,
                    f"{action} raises the number of {what} held to {count}, but the schedule declares "
                    f"at most {promised}",
                )
        held -= action.kind in GIVES_INPUT_GRADIENT
        deferred -= action.kind is ActionKind.WEIGHT


def _where(schedule: PipelineSchedule) -> str:
    return f"{schedule.stages} stages, {schedule.chunks} chunks, {schedule.microbatches} microbatches"


def _error(schedule: PipelineSchedule, rank: int, what: str) -> LauncherError:
    return LauncherError(f"{schedule.name}: rank {rank}: {what}", where=_where(schedule))
