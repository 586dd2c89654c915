"""The schedules: functions from (stages, microbatches, chunks) to lists of actions.

All are one pattern, `_weave`: some forwards to fill the pipeline; then a backward and a forward in turns; then what is
left of the backwards. A schedule says in which order its rank takes forwards and backwards, how many forwards come
first, and, where backwards are split, how far the weight gradients lag behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from launcher.errors import ConfigError
from launcher.pipeline.actions import Action, ActionKind, PipelineSchedule

# A (virtual stage, microbatch); None is a turn that passes, so that what follows keeps its place in the pattern.
ScheduleSlot = tuple[int, int] | None


@dataclass(frozen=True)
class ScheduleBuilder:
    """How one schedule is made.

    Args:
        make: (stages, microbatches, chunks) -> Schedule.
        chunks: the fixed number of virtual stages a rank has; None where the user chooses.
    """

    make: Callable[[int, int, int], PipelineSchedule]
    chunks: int | None = 1


ONE_STAGE = "1f1b"
"""For a model that is not cut: each forward is followed by its backward."""


@lru_cache(maxsize=64)  # the same at every step
def schedule(name: str, stages: int, microbatches: int, chunks: int | None = None) -> PipelineSchedule:
    """The schedule of a name.

    Args:
        name: a key of `SCHEDULES`.
        stages: ranks of the pp axis, P. 1 works for all: there is nothing to overlap.
        microbatches: of a step, m.
        chunks: virtual stages a rank has, v; None takes what the schedule has, for interleaved 2.

    Raises:
        ConfigError: the name is unknown, or the numbers are none that the schedule can have.
    """
    where = "pipeline schedule"
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r}", where=where, fix="one of " + ", ".join(SCHEDULES))
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if number < 1:
            raise ConfigError(f"{what} is {number}", where=where, fix="a whole number from 1")
    maker = SCHEDULES[name]
    if maker.chunks is None:
        chunks = 2 if chunks is None else chunks
        if chunks < 2:
            raise ConfigError(
                f"{name} with {chunks} chunks",
                where=where,
                fix='chunks from 2 on; with one chunk it is "1f1b"',
            )
        return maker.make(stages, microbatches, chunks)
    if chunks not in (None, maker.chunks):
        raise ConfigError(
            f"{name} has {maker.chunks} chunks a rank, not {chunks}",
            where=where,
            fix='leave chunks out; "interleaved" takes any number',
        )
    return maker.make(stages, microbatches, maker.chunks)


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """GPipe (Huang et al. 1811.06965): all forwards, then all backwards. Holds every microbatch."""
    return _one_chunk("gpipe", stages, microbatches, lambda rank: microbatches)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """1F1B (PipeDream-flush, Narayanan et al. 2104.04473): backwards as early as possible.

    GPipe's bubble; rank r holds P - r microbatches, however many there are.
    """
    return _one_chunk("1f1b", stages, microbatches, lambda rank: stages - rank)


def interleaved(stages: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """Interleaved 1F1B (Narayanan et al. 2104.04473): virtual stage k on rank k % P; 1F1B's bubble divided by v.

    A rank takes a group of microbatches through one chunk, then through the next. Groups of exactly P need m to be a
    multiple of P. Here the groups are P or more, as even as can be, which makes the same bubble for every m >= P; a
    rank holds (v - 1)(largest group - P) more.
    """
    groups = max(1, microbatches // stages)
    sizes = [microbatches // groups + (group < microbatches % groups) for group in range(groups)]
    order = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]

    def rank_actions(rank: int) -> list[Action]:
        held = [rank + chunk * stages for chunk in range(chunks)]
        forwards = _slots(order, held, microbatches)
        backwards = _slots((chunks - 1 - chunk for chunk in order), held, microbatches)
        return _weave(forwards, backwards, warmup[rank])

    warmup = [2 * (stages - 1 - rank) + (chunks - 1) * sizes[0] + 1 for rank in range(stages)]
    return _synchronous(
        "interleaved",
        microbatches,
        tuple(stage % stages for stage in range(stages * chunks)),
        [rank_actions(rank) for rank in range(stages)],
        held=[min(count, chunks * microbatches) for count in warmup],
    )


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """ZB-H1 (Qi et al. 2401.10241): 1F1B whose weight gradients fill the bubble; a third of it where F = I = W.

    Rank r runs the weight gradients r microbatches later, so that with them every rank has P microbatches under way:
    the memory of 1F1B's first rank.
    """
    return _one_chunk("zb-h1", stages, microbatches, lambda rank: stages - rank, lag=lambda rank: rank)


def zbv(stages: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """ZB-V (Qi et al. 2401.10241, 2405.15362): rank r has virtual stages r and 2P - 1 - r, a V through the ranks.

    First and last stage lie on rank 0, and all ranks hold the same: 2P halves, what 1F1B's first rank holds. Where
    F = I = W and m >= 2P - 2 the step takes no longer than the last rank computes, and waits for its first microbatch.
    """

    def rank_actions(rank: int) -> list[Action]:
        down, behind = stages - rank, 2 * rank
        held = [rank, 2 * stages - 1 - rank]
        steady = [0, 1] * microbatches
        forwards = _slots([0] * (2 * down - 1) + [1, 0] * rank + [1] * down + steady, held, microbatches)
        backwards = _slots([1] * down + steady + [0] * down, held, microbatches)
        # The last input gradients run without pause, for the ranks that wait for them.
        hurry = 2 * microbatches - down - behind
        return _weave(forwards, backwards, 2 * stages, lambda turn: min(max(0, turn + 1 - hurry), behind))

    return _synchronous(
        "zbv",
        microbatches,
        tuple(min(stage, 2 * stages - 1 - stage) for stage in range(2 * stages)),
        [rank_actions(rank) for rank in range(stages)],
        held=[min(2 * stages, 2 * microbatches)] * stages,
        deferred=[min(2 * rank + 1, 2 * microbatches) for rank in range(stages)],
    )


def pipedream(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """PipeDream (Narayanan et al., SOSP 2019): 1F1B that never drains; the weights change after each backward.

    NOT equal to synchronous training. The forward of a microbatch takes the newest weights of its rank, and its
    backward the same ones, which are kept for it: up to P - r versions on rank r. Ranks differ in how old they are.
    The list is that of one step between an empty pipeline and an empty one; `streams.stream` joins steps.
    """
    drained = one_f_one_b(stages, microbatches)
    return replace(
        drained, name="pipedream", weight_versions=drained.held, update_every=1, flushes=False, delay=None
    )


def two_buffered_weights(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """PipeDream-2BW (Narayanan et al. 2006.09503): 1F1B that never drains; the weights change after m microbatches.

    NOT equal to synchronous training: step t takes, on all ranks, the weights from before step t - 1, and so a gradient
    is one update old. Two versions are kept. Needs m >= P, else the weights of a step are not ready when it starts.

    Raises:
        ConfigError: m < P.
    """
    if microbatches < stages:
        raise ConfigError(
            f"2bw with {microbatches} microbatches on {stages} stages",
            where="pipeline schedule",
            fix=f"{stages} microbatches or more",
        )
    drained = one_f_one_b(stages, microbatches)
    return replace(drained, name="2bw", weight_versions=(2,) * stages, flushes=False, delay=1)


DRAINED = {"pipedream": "1f1b", "2bw": "1f1b"}
"""Asynchronous schedule -> what it is where no weights change: in an evaluation, and for the places of stages."""

SCHEDULES = {
    "gpipe": ScheduleBuilder(gpipe),
    "1f1b": ScheduleBuilder(one_f_one_b),
    "interleaved": ScheduleBuilder(interleaved, chunks=None),
    "zb-h1": ScheduleBuilder(zb_h1),
    "zbv": ScheduleBuilder(zbv, chunks=2),
    "pipedream": ScheduleBuilder(pipedream),
    "2bw": ScheduleBuilder(two_buffered_weights),
}


def _one_chunk(
    name: str,
    stages: int,
    microbatches: int,
    warmup: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
) -> PipelineSchedule:
    """A schedule in which rank r is stage r. `warmup` and `lag` (None: whole backwards) are functions of the rank."""

    def rank_actions(rank: int) -> list[Action]:
        slots: list[ScheduleSlot] = [(rank, microbatch) for microbatch in range(microbatches)]
        behind = None if lag is None else lambda turn: lag(rank)
        return _weave(slots, slots, warmup(rank), behind)

    return _synchronous(
        name,
        microbatches,
        tuple(range(stages)),
        [rank_actions(rank) for rank in range(stages)],
        held=[min(warmup(rank), microbatches) for rank in range(stages)],
        deferred=None if lag is None else [min(lag(rank) + 1, microbatches) for rank in range(stages)],
    )


def _synchronous(
    name: str,
    microbatches: int,
    rank_of: tuple[int, ...],
    actions: Iterable[Sequence[Action]],
    held: Sequence[int],
    deferred: Sequence[int] | None = None,
) -> PipelineSchedule:
    stages = len(held)
    return PipelineSchedule(
        name=name,
        stages=stages,
        chunks=len(rank_of) // stages,
        microbatches=microbatches,
        rank_of=rank_of,
        actions=tuple(tuple(of_rank) for of_rank in actions),
        held=tuple(held),
        deferred=(0,) * stages if deferred is None else tuple(deferred),
        weight_versions=(1,) * stages,
        update_every=microbatches,
    )


def _slots(chunks: Iterable[int], stages: Sequence[int], microbatches: int) -> list[ScheduleSlot]:
    """A pattern of chunks with the microbatches numbered; a turn of a chunk that has had all of them passes."""
    turns = [0] * len(stages)
    slots: list[ScheduleSlot] = []
    for chunk in chunks:
        slots.append((stages[chunk], turns[chunk]) if turns[chunk] < microbatches else None)
        turns[chunk] += 1
    return slots


def _weave(
    forwards: Sequence[ScheduleSlot],
    backwards: Sequence[ScheduleSlot],
    warmup: int,
    lag: Callable[[int], int] | None = None,
) -> list[Action]:
    """`warmup` forwards; then a backward and a forward in turns, until neither is left.

    Args:
        forwards, backwards: what the rank runs, in order.
        warmup: forwards before the first backward.
        lag: None for whole backwards. Else they are split, and after the backward of turn n the weight gradients of
            all but the last `lag(n)` turns are made.
    """
    back = ActionKind.BACKWARD if lag is None else ActionKind.INPUT
    made: list[tuple[ActionKind, ScheduleSlot]] = [(ActionKind.FORWARD, slot) for slot in forwards[:warmup]]
    weights = 0  # turns whose weight gradients are made
    for turn in range(max(len(backwards), len(forwards) - warmup)):
        made.extend((back, slot) for slot in backwards[turn : turn + 1])
        if lag is not None:
            due = max(weights, turn + 1 - lag(turn))
            made.extend((ActionKind.WEIGHT, slot) for slot in backwards[weights:due])
            weights = due
        made.extend((ActionKind.FORWARD, slot) for slot in forwards[warmup + turn : warmup + turn + 1])
    if lag is not None:
        made.extend((ActionKind.WEIGHT, slot) for slot in backwards[weights:])
    return [Action(kind, *slot) for kind, slot in made if slot is not None]
