"""The best partition of a sequence of layers: compared with all partitions, at scale, and its report."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from launcher.errors import ConfigError
from launcher.pipeline.partition.best_cut import Balance, partition


def quality(costs: Sequence[float], boundaries: Sequence[int]) -> tuple[float, float, int]:
    """Return what is minimized: the most expensive stage, the squares of costs, the squares of layer counts."""
    parts = [sum(costs[begin:end]) for begin, end in pairwise(boundaries)]
    counts = [end - begin for begin, end in pairwise(boundaries)]
    return max(parts), sum(part**2 for part in parts), sum(count**2 for count in counts)


def best(costs: Sequence[float], stages: int) -> tuple[float, float, int]:
    """Try every partition."""
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(quality(costs, [0, *cut, len(costs)]) for cut in cuts)


def every_small_row() -> Iterator[tuple[tuple[int, ...], int]]:
    for layers in range(1, 6):
        for costs in itertools.product((0, 1, 5), repeat=layers):
            yield from ((costs, stages) for stages in range(1, layers + 1))


def some_rows(number: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Sequences for which the smallest sum of squares and the cheapest longest stage often differ."""
    draw = random.Random(0)
    for _ in range(number):
        layers = draw.randint(6, 9)
        yield tuple(draw.choice((1, 1, 2, 3, 4, 7, 9)) for _ in range(layers)), draw.randint(2, layers)


@pytest.mark.parametrize("rows", [every_small_row(), some_rows(800)], ids=["small", "larger"])
def test_no_other_cut_is_better(rows: Iterator[tuple[tuple[int, ...], int]]) -> None:
    for costs, stages in rows:
        check(costs, stages)


def check(costs: Sequence[int], stages: int) -> None:
    boundaries = partition(costs, stages)
    assert boundaries[0] == 0 and boundaries[-1] == len(costs) and len(boundaries) == stages + 1
    assert all(begin < end for begin, end in pairwise(boundaries))
    assert quality(costs, boundaries) == best(costs, stages), (costs, stages)


def test_cuts_that_can_be_seen() -> None:
    assert partition([1] * 8, 4) == [0, 2, 4, 6, 8]
    assert partition([1, 1, 1, 1, 2], 2) == [0, 3, 5]  # the head is as dear as two blocks
    assert partition([1] * 7, 2) == [
        0,
        3,
        7,
    ]  # the first stage keeps more microbatches: it is the smaller one
    assert partition([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]
    assert partition([0] * 6, 3) == [0, 2, 4, 6]
    assert partition([0.5], 1) == [0, 1]


@pytest.mark.parametrize(
    "costs", [[1.1] * 1000, [1e9, *[1.0] * 999], [0] * 1000], ids=["even", "one", "none"]
)
def test_many_layers_take_no_time(costs: list[float]) -> None:
    began = time.process_time()
    partition(costs, 64)
    assert time.process_time() - began < 3.0


def test_too_few_layers_and_wrong_costs() -> None:
    with pytest.raises(
        ConfigError, match=r"2 layers cannot be split into 3 stages(?s:.)*at most 2 virtual stages"
    ):
        partition([1, 1], 3)
    for costs in ([-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(ConfigError, match="a cost of"):
            partition(costs, 1)


def test_the_balance_is_a_line_a_stage() -> None:
    balance = Balance((0, 3, 4), (6.0, 4.0), (12_000_000, 8_400_000))
    assert balance.lines() == [
        "stage 0  layers 0-2  60.0% of the cost  12.0 M parameters  20% over the mean",
        "stage 1  layer 3     40.0% of the cost   8.4 M parameters  20% under the mean",
    ]
    timed = Balance((0, 3, 4), (0.0123, 0.0041), (12_000_000, 8_400_000), seconds=True).lines()
    assert "layer 3      4.1 ms, 25.0% of the cost" in timed[1]
    assert "the mean" in Balance((0, 1), (0.0,), (0,)).lines()[0]
