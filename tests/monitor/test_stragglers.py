"""Slow ranks: which are reported, and which are not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from launcher.monitor.flight_recorder import StepCounters
from launcher.monitor.stragglers import AGAIN, Straggler, StragglerDetector

PARTS = {"forward": 0.03, "backward": 0.06, "step": 0.01}
Slowness = Callable[[int, int, str], float]
"""rank, step, phase -> times the usual time."""


def simulated(
    ranks: int, steps: int, slowness: Slowness, groups: list[object] | None = None, noise: float = 0.03
) -> list[tuple[int, Straggler]]:
    """Return (step, reported ranks) of a run in which all ranks wait for the slowest one in backward."""
    dice, detector = random.Random(1), StragglerDetector(groups or [0] * ranks)
    totals = [dict.fromkeys([*PARTS, "backward_wait"], 0.0) for _ in range(ranks)]
    named = []
    for step in range(1, steps + 1):
        own = [
            {
                phase: usual * slowness(rank, step, phase) * dice.gauss(1.0, noise)
                for phase, usual in PARTS.items()
            }
            for rank in range(ranks)
        ]
        slowest = max(sum(times.values()) for times in own)
        for rank, times in enumerate(own):
            waited = slowest - sum(times.values())
            for phase, seconds in times.items():
                totals[rank][phase] += seconds
            totals[rank]["backward"] += waited
            totals[rank]["backward_wait"] += waited
        newest = {rank: StepCounters(steps=step, counted=step, **total) for rank, total in enumerate(totals)}
        named += [(step, slow) for slow in detector.look(newest)]
    return named


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("begins", [100, 102, 104])
def test_a_slow_rank_is_named_within_twenty_steps(ranks: int, begins: int) -> None:
    named = simulated(ranks, 200, lambda rank, step, _: 1.3 if rank == 1 and step > begins else 1.0)
    ((step, slow),) = named
    assert slow.rank == 1 and step <= begins + 20 and slow.ratio == pytest.approx(1.3, rel=0.1)


def test_the_phase_that_loses_most_is_named() -> None:
    named = simulated(4, 60, lambda rank, _, phase: 3.0 if rank == 2 and phase == "forward" else 1.0)
    (slow,) = {slow.phase for _, slow in named}
    assert slow == "forward" and named[0][1].ratio == pytest.approx(3.0, rel=0.05)


def test_nobody_is_named_where_all_are_alike() -> None:
    assert not simulated(8, 2000, lambda *_: 1.0, noise=0.1)
    assert not simulated(2, 2000, lambda *_: 1.0, noise=0.1)


def test_all_of_them_slower_is_nobody_slow() -> None:
    assert not simulated(4, 100, lambda _, step, __: 2.0 if step > 50 else 1.0)


def test_ranks_with_other_work_are_not_compared() -> None:
    assert not simulated(4, 100, lambda rank, *_: 2.0 if rank > 1 else 1.0, groups=[0, 0, 1, 1])
    assert not simulated(2, 100, lambda rank, *_: 2.0 if rank else 1.0, groups=[0, 1])


def test_a_rank_that_stays_slow_is_named_now_and_then() -> None:
    named = simulated(4, 2 * AGAIN + 50, lambda rank, *_: 1.5 if rank == 3 else 1.0)
    assert [slow.rank for _, slow in named] == [3, 3, 3]


def test_a_restart_begins_anew() -> None:
    detector = StragglerDetector([0, 0])
    for counted in (10, 20, 0, 3):
        detector.look({rank: StepCounters(counted=counted, forward=counted) for rank in range(2)})
    assert detector.found == {}
