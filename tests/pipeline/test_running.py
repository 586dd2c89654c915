"""Errors in action lists: mutations that `check` must find, deadlocks under any timing, message order."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise

import pytest

from launcher.errors import LauncherError
from launcher.pipeline.schedules import SCHEDULES, schedule
from launcher.pipeline.schedules.actions import Action, ActionKind, PipelineSchedule, dependencies
from launcher.pipeline.schedules.check import check
from launcher.pipeline.schedules.transfers import arrivals, matching_receive, with_transfers
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate

CHOSEN = [("gpipe", None), ("1f1b", None), ("interleaved", 3), ("zb-h1", None), ("zbv", None)]


def with_rank(made: PipelineSchedule, rank: int, actions: list[Action]) -> PipelineSchedule:
    lists = list(made.actions)
    lists[rank] = tuple(actions)
    return replace(made, actions=tuple(lists))


@pytest.mark.parametrize(("name", "chunks"), CHOSEN)
def test_a_dropped_or_doubled_action_is_found(name: str, chunks: int | None) -> None:
    made = schedule(name, 3, 4, chunks)
    for rank, actions in enumerate(made.actions):
        for at, action in enumerate(actions):
            rest = [*actions[:at], *actions[at + 1 :]]
            with pytest.raises(LauncherError, match=f"rank {rank}: .* is missing"):
                check(with_rank(made, rank, rest))
            with pytest.raises(LauncherError, match=f"rank {rank}: {action} occurs 2 times"):
                check(with_rank(made, rank, [*actions, action]))
            if rank:
                with pytest.raises(LauncherError, match=f"rank 0: {action} does not belong on this rank"):
                    check(with_rank(with_rank(made, rank, rest), 0, [*made.actions[0], action]))


@pytest.mark.parametrize(("name", "chunks"), CHOSEN)
def test_a_swap_against_a_dependency_is_found(name: str, chunks: int | None) -> None:
    """An action before a dependency on the same rank is found; any other swap is refused or still runs."""
    made = schedule(name, 3, 4, chunks)
    needs = dependencies(made)
    swapped = 0
    for rank, actions in enumerate(made.actions):
        for first in range(len(actions)):
            for second in range(first + 1, len(actions)):
                if actions[first] not in needs[actions[second]]:
                    continue
                wrong = list(actions)
                wrong[first], wrong[second] = wrong[second], wrong[first]
                with pytest.raises(
                    LauncherError, match=rf"rank {rank}: .* comes before .*, on which it depends"
                ):
                    check(with_rank(made, rank, wrong))
                swapped += 1
    assert swapped >= 12


def test_what_needs_what() -> None:
    whole, split = schedule("1f1b", 2, 1), schedule("zb-h1", 2, 1)
    told = [
        {str(action): " ".join(map(str, needed)) for action, needed in dependencies(made).items()}
        for made in (whole, split)
    ]
    assert told[0] == {"F0.0": "", "F1.0": "F0.0", "B1.0": "F1.0", "B0.0": "F0.0 B1.0"}
    assert told[1] == {
        "F0.0": "",
        "F1.0": "F0.0",
        "I1.0": "F1.0",
        "W1.0": "I1.0",
        "I0.0": "F0.0 I1.0",
        "W0.0": "I0.0",
    }


def test_a_deadlock_names_who_waits_for_whom() -> None:
    """Rank 0 needs the first backward before it sends the microbatch that rank 1 needs first."""
    made = schedule("gpipe", 2, 2)
    reordered = {0: "F0.0 B0.0 F0.1 B0.1", 1: "F1.0 F1.1 B1.0 B1.1"}
    for rank, words in reordered.items():
        by_name = {str(action): action for action in made.actions[rank]}
        made = with_rank(made, rank, [by_name[word] for word in words.split()])
    with pytest.raises(LauncherError) as error:
        check(made)
    assert "rank 0 waits at B0.0 for B1.0 of rank 1; rank 1 waits at F1.1 for F0.1 of rank 0" in str(
        error.value
    )


def test_memory_above_the_promise_is_found() -> None:
    made = schedule("1f1b", 3, 5)
    with pytest.raises(
        LauncherError, match=r"F0\.2 raises the number of activations held to 3, .* at most 2"
    ):
        check(replace(made, held=(2, 2, 1)))
    split = schedule("zb-h1", 3, 5)
    with pytest.raises(
        LauncherError, match=r"rank 2: I2\.2 raises the number of deferred weight gradients held to 3"
    ):
        check(replace(split, deferred=(1, 2, 2)))


def test_every_schedule_is_checked_before_it_runs() -> None:
    """A schedule without backwards is an evaluation: its forwards are required, and it holds nothing."""
    made = schedule("1f1b", 2, 3)
    with pytest.raises(LauncherError, match=r"rank 0: B0\.2 is missing"):
        with_transfers(with_rank(made, 0, list(made.actions[0][:-1])))
    forwards = tuple(tuple(a for a in actions if a.kind is ActionKind.FORWARD) for actions in made.actions)
    assert len(with_transfers(replace(made, actions=forwards))[1]) == 6
    with pytest.raises(LauncherError, match=r"rank 1: F1\.2 is missing"):
        with_transfers(replace(made, actions=(forwards[0], forwards[1][:-1])))


def test_simulations_with_any_costs_and_delays() -> None:
    """200 simulations: no deadlock, dependencies hold, one action at a time, and never faster than the work."""
    dice = random.Random(7)
    for _ in range(200):
        name = dice.choice(list(SCHEDULES))
        stages = dice.randint(1, 5)
        made = schedule(
            name,
            stages,
            dice.randint(stages, 9) if name == "2bw" else dice.randint(1, 9),
            dice.randint(2, 4) if name == "interleaved" else None,
        )
        check(made)
        rows = [[dice.uniform(0, 3) for _ in range(made.virtual_stages)] for _ in range(3)]
        costs = MicrobatchCosts(*(tuple(row) for row in rows), transfer=dice.choice((0, 0.5)))
        delays = {action: dice.uniform(0, 20) for action in dice.sample(made.actions[0], 2)}
        timeline = simulate(made, costs, delays)
        assert tuple(tuple(span.action for span in spans) for spans in timeline.spans) == made.actions
        span_of = {span.action: span for spans in timeline.spans for span in spans}
        for action, needed in dependencies(made).items():
            for before in needed:
                away = made.rank_of[before.stage] != made.rank_of[action.stage]
                assert span_of[action].start >= span_of[before].end + costs.transfer * away
        for spans in timeline.spans:
            assert all(one.end <= two.start for one, two in pairwise(spans))
        assert timeline.total >= max(timeline.busy) and 0 <= timeline.bubble < 1
        assert all(peak <= bound for peak, bound in zip(timeline.peak_held, made.held, strict=True))


def test_a_slow_stage_sets_the_pace() -> None:
    """Each virtual stage has its own cost: one that is twice as slow determines the time."""
    made = schedule("1f1b", 4, 16)
    costs = MicrobatchCosts((1, 1, 2, 1), (1, 1, 2, 1), (1, 1, 2, 1), transfer=0.25)
    timeline = simulate(made, costs)
    assert timeline.busy == (48, 48, 96, 48)
    assert 96 + 2 * 3 < timeline.total < 96 + 16
    with pytest.raises(LauncherError, match="3 virtual stages, but the schedule has 4"):
        simulate(made, MicrobatchCosts.even(3, 1, 1, 1))


def test_the_curve_of_what_is_held() -> None:
    timeline = simulate(schedule("1f1b", 2, 2), MicrobatchCosts.even(2, 1, 1, 1))
    assert timeline.held(0) == [(0, 1), (1, 2), (6, 1), (9, 0)]
    assert timeline.peak_held == (2, 1)


@pytest.mark.parametrize(("name", "chunks"), CHOSEN)
def test_transfers_reach_who_waits_for_them(name: str, chunks: int | None) -> None:
    """Uses queues without tags, like pairs of ranks: receives posted in the order of `arrivals` match."""
    made = schedule(name, 3, 5, chunks)
    full, inbound = with_transfers(made), arrivals(made)
    computed = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)
    assert tuple(tuple(step for step in steps if step.kind in computed) for steps in full) == made.actions
    posted = [{key: deque(order) for key, order in of_rank.items()} for of_rank in inbound]
    arrived: set[Action] = set()
    position = [0] * 3
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(full):
            while position[rank] < len(steps):
                step = steps[position[rank]]
                if step.kind in (ActionKind.RECV_F, ActionKind.RECV_B) and step not in arrived:
                    break
                if step.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                    wanted = matching_receive(step)
                    target = made.rank_of[wanted.stage]
                    assert target != rank
                    assert posted[target][rank, wanted.kind].popleft() == wanted
                    arrived.add(wanted)
                position[rank] += 1
                moved = True
    assert position == [len(steps) for steps in full]
    assert not any(queue for of_rank in posted for queue in of_rank.values())
    kinds = Counter(step.kind for steps in full for step in steps)
    crossings = sum(one != two for one, two in pairwise(made.rank_of))
    assert (
        kinds[ActionKind.SEND_F]
        == kinds[ActionKind.RECV_F]
        == kinds[ActionKind.SEND_B]
        == kinds[ActionKind.RECV_B]
        == 5 * crossings
    )


def test_where_transfers_stand() -> None:
    """A send follows its producer, a receive precedes its consumer, and there are none inside a rank."""
    full = [" ".join(map(str, steps)) for steps in with_transfers(schedule("zbv", 2, 1))]
    assert full == [
        "F0.0 SEND_F0.0 RECV_F3.0 F3.0 I3.0 SEND_B3.0 W3.0 RECV_B0.0 I0.0 W0.0",
        "RECV_F1.0 F1.0 F2.0 SEND_F2.0 RECV_B2.0 I2.0 I1.0 SEND_B1.0 W2.0 W1.0",
    ]
    full = [" ".join(map(str, steps)) for steps in with_transfers(schedule("pipedream", 2, 2))]
    assert full == [  # nobody waits for an update
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 U0.0 RECV_B0.1 B0.1 U0.1",
        "RECV_F1.0 F1.0 B1.0 SEND_B1.0 U1.0 RECV_F1.1 F1.1 B1.1 SEND_B1.1 U1.1",
    ]
    looped = arrivals(schedule("interleaved", 2, 2, 2))[0]
    assert {key: list(map(str, order)) for key, order in looped.items()} == {
        (1, ActionKind.RECV_F): ["RECV_F2.0", "RECV_F2.1"],
        (1, ActionKind.RECV_B): ["RECV_B2.0", "RECV_B2.1", "RECV_B0.0", "RECV_B0.1"],
    }
    assert with_transfers(schedule("1f1b", 1, 2)) == schedule("1f1b", 1, 2).actions
