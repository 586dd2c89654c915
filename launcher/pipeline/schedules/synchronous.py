"""The synchronous schedules: functions from (stages, microbatches, chunks) to lists of actions.

All follow one pattern, `_weave`: warmup forwards that fill the pipeline, then alternating backwards and
forwards, then the remaining backwards. A schedule specifies the order of a rank's forwards and backwards, the
number of warmup forwards and, where backwards are split, how far the weight gradients lag behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from launcher.pipeline.schedules.actions import Action, ActionKind, PipelineSchedule

# (virtual stage, microbatch), or None: a skipped turn, so that later slots keep their place in the pattern.
ScheduleSlot = tuple[int, int] | None


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Build GPipe (Huang et al. 1811.06965): all forwards, then all backwards. Holds all microbatches."""
    return _one_chunk("gpipe", stages, microbatches, lambda rank: microbatches)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Build 1F1B (PipeDream-flush, Narayanan et al. 2104.04473): backwards as early as possible.

    Has GPipe's bubble, but rank r holds at most P - r microbatches, independent of m.
    """
    return _one_chunk("1f1b", stages, microbatches, lambda rank: stages - rank)


def interleaved(stages: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """Build interleaved 1F1B (Narayanan et al. 2104.04473): stage k on rank k % P; 1F1B's bubble / v.

    A rank runs a group of microbatches through one chunk, then through the next. Groups of exactly P would
    require m to be a multiple of P. Here a group has P or more microbatches, and groups are as even as
    possible: the bubble is the same for every m >= P, and a rank holds (v - 1)(largest group - P) more
    activations.
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
    """Build ZB-H1 (Qi et al. 2401.10241): 1F1B that fills its bubble with W; a third is left if F = I = W.

    Rank r computes weight gradients r microbatches later. Including these, every rank has P microbatches in
    flight: the memory of 1F1B's first rank.
    """
    return _one_chunk("zb-h1", stages, microbatches, lambda rank: stages - rank, lag=lambda rank: rank)


def zbv(stages: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """Build ZB-V (Qi et al. 2401.10241, 2405.15362): rank r has stages r and 2P - 1 - r, a V.

    The first and the last virtual stage are on rank 0. Every rank holds 2P half-size activations, as much as
    1F1B's first rank. Where F = I = W and m >= 2P - 2, the step takes only as long as the last rank computes
    and waits for its first microbatch.
    """

    def rank_actions(rank: int) -> list[Action]:
        down, behind = stages - rank, 2 * rank
        held = [rank, 2 * stages - 1 - rank]
        steady = [0, 1] * microbatches
        forwards = _slots([0] * (2 * down - 1) + [1, 0] * rank + [1] * down + steady, held, microbatches)
        backwards = _slots([1] * down + steady + [0] * down, held, microbatches)
        # The last input gradients run back to back, because other ranks wait for them.
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


def _one_chunk(
    name: str,
    stages: int,
    microbatches: int,
    warmup: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
) -> PipelineSchedule:
    """Return a schedule in which rank r is stage r. `warmup` and `lag` (None: backwards are not split) are
    functions of the rank."""

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
    """Assign microbatches to a pattern of chunks, in order; a chunk that has had all of them skips its
    turn."""
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
    """Return `warmup` forwards, then alternating backwards and forwards until none are left.

    Args:
        forwards, backwards: the rank's forwards and backwards, in order.
        warmup: number of forwards before the first backward.
        lag: None: backwards are not split. Otherwise, after the input gradient of turn n, the weight
            gradients of all but the last `lag(n)` turns are computed.
    """
    back = ActionKind.BACKWARD if lag is None else ActionKind.INPUT
    made: list[tuple[ActionKind, ScheduleSlot]] = [(ActionKind.FORWARD, slot) for slot in forwards[:warmup]]
    weights = 0  # number of turns whose weight gradients are scheduled
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
