"""Every schedule: the papers' grid, its bubble by formula, its memory bound, and errors for invalid use."""

from __future__ import annotations

import pytest

from launcher.errors import ConfigError
from launcher.pipeline.schedules import SCHEDULES, schedule
from launcher.pipeline.schedules.asynchronous import weights_used
from launcher.pipeline.schedules.check import check
from launcher.pipeline.timeline.bubble import bubble_time
from launcher.pipeline.timeline.draw import grid
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate
from tests.pipeline.delayed import stream

GRIDS = {
    ("gpipe", 3, 3, None): """
rank 0  F0 F1 F2 .  .  .  .  .  .  B0--- B1--- B2---
rank 1  .  F0 F1 F2 .  .  .  B0--- B1--- B2---
rank 2  .  .  F0 F1 F2 B0--- B1--- B2---""",
    ("1f1b", 3, 4, None): """
rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---""",
    ("interleaved", 2, 4, 2): """
rank 0  F0a F1a F0b F1b F2a .   B0b---- F3a B1b---- F2b B0a---- F3b B1a---- .   B2b---- .   B3b---- B2a---- B3a----
rank 1  .   F0a F1a F0b B0b---- F1b B1b---- F2a B0a---- F3a B1a---- F2b B2b---- F3b B3b---- B2a---- B3a----""",
    ("zb-h1", 3, 4, None): """
rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3""",
    ("zbv", 2, 4, None): """
rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a
rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a""",
}
SPANS = [(stages, microbatches) for stages in (1, 2, 3, 5) for microbatches in (1, 2, 4, 5, 8, 11)]
NAMES = [(name, chunks) for name in SCHEDULES for chunks in ((2, 3) if name == "interleaved" else (None,))]


@pytest.mark.parametrize("asked", GRIDS, ids=str)
def test_grids(asked: tuple[str, int, int, int | None]) -> None:
    assert grid(schedule(*asked)) == GRIDS[asked].strip("\n")


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_bubble_memory_and_order(name: str, chunks: int | None) -> None:
    """For every number of stages and microbatches: valid, the formula's bubble, and exactly the promised memory."""
    compared = 0
    for stages, microbatches in SPANS:
        if name == "2bw" and microbatches < stages:
            continue
        made = schedule(name, stages, microbatches, chunks)
        check(made)
        for costs in ((1, 1, 1), (2, 3, 1), (3, 2, 4), (2, 1, 1)):
            share = [cost / made.chunks for cost in costs]
            timeline = simulate(made, MicrobatchCosts.even(made.virtual_stages, *share))
            forward, input, weight = costs
            idle = bubble_time(
                name, stages, microbatches, made.chunks, forward=forward, input=input, weight=weight
            )
            if idle is not None:
                compared += 1
                assert timeline.total == pytest.approx(microbatches * sum(costs) + idle), (
                    stages,
                    microbatches,
                    costs,
                )
                assert timeline.bubble_over_ideal == pytest.approx(idle / (microbatches * sum(costs)))
                assert timeline.bubble == pytest.approx(idle / (microbatches * sum(costs) + idle))
            if name != "zbv" or microbatches >= 2 * stages - 1:
                assert timeline.peak_held == made.held, (stages, microbatches)
    assert compared > 15


def test_the_papers_numbers() -> None:
    """Bubble relative to ideal time as published, and the activations of each rank, for 4 stages and 8 microbatches."""
    assert bubble_time("1f1b", 4, 8) == 9 and bubble_time("zb-h1", 4, 8) == 3  # a third
    assert bubble_time("interleaved", 4, 8, 2) == 4.5  # divided by the chunks
    assert bubble_time("zb-h1", 4, 8, forward=2, input=3, weight=1) == 3 * (2 + 3 - 1)  # (p-1)(F+B-W)
    assert bubble_time("zbv", 4, 8) == 1.5  # a sixth
    assert schedule("gpipe", 4, 8).held == (8, 8, 8, 8)
    assert schedule("1f1b", 4, 8).held == schedule("zb-h1", 4, 8).held == (4, 3, 2, 1)
    assert schedule("interleaved", 4, 8, 2).held == (11, 9, 7, 5)  # rank 0: P v (1 + (P-1)/(P v))
    assert schedule("zbv", 4, 8).held == (8, 8, 8, 8)  # halves: 1F1B's first rank
    for name in ("zb-h1", "zbv"):
        made = schedule(name, 4, 12)
        for rank, actions in enumerate(made.actions):
            count, peak = 0, 0
            for action in actions:
                count += (action.kind == "F") - (action.kind == "W")
                peak = max(peak, count)
            assert peak <= 4 * made.chunks, rank


def test_placement_of_virtual_stages() -> None:
    assert schedule("interleaved", 3, 4, 2).rank_of == (0, 1, 2, 0, 1, 2)
    assert schedule("zbv", 3, 4).rank_of == (0, 1, 2, 2, 1, 0)
    assert schedule("zbv", 3, 4).stages_of(1) == (1, 4)


@pytest.mark.parametrize("name", ["pipedream", "2bw"])
def test_steps_that_do_not_drain(name: str) -> None:
    """The bubble is that of one warm-up and cool-down.

    Weights are as old as promised, and as many versions are kept.
    """
    one = schedule(name, 4, 8)
    assert not one.flushes
    joined = stream(one, 10)
    check(joined)
    assert simulate(joined, MicrobatchCosts.even(4, 1, 1, 1)).total == 10 * 8 * 3 + 9
    used = weights_used(joined)
    for rank, actions in enumerate(joined.actions):
        alive: set[int] = set()
        pending: dict[int, int] = {}
        for done, action in enumerate(action for action in actions if action.kind in "FB"):
            if action.kind == "F":
                pending[action.microbatch] = used[rank][action.microbatch]
            alive = set(pending.values())
            assert len(alive) <= one.weight_versions[rank], done
            pending.pop(action.microbatch if action.kind == "B" else -1, None)
    if name == "pipedream":
        assert [row[-1] for row in used] == [79 - 3, 79 - 2, 79 - 1, 79]  # the last rank has the newest
    else:
        assert used[0] == used[3] and used[0][:8] == (0,) * 8 and set(used[0][16:24]) == {1}
    assert set(weights_used(schedule("1f1b", 2, 3))[0]) == {0}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("1f2b", 2, 2), "gpipe, 1f1b, interleaved, zb-h1, zbv, pipedream, 2bw"),
        (("1f1b", 0, 2), "stages is 0"),
        (("1f1b", 2, 0), "microbatches is 0"),
        (("1f1b", 2, 2, 2), "1f1b has 1 chunks per rank, not 2"),
        (("zbv", 2, 2, 3), "zbv has 2 chunks per rank, not 3"),
        (("interleaved", 2, 2, 1), '"1f1b"'),
        (("2bw", 4, 3), "at least 4 microbatches"),
    ],
)
def test_misuse_says_what_to_write(asked: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        schedule(*asked)
    assert words in str(error.value)
