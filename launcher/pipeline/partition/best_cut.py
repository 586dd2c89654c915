"""The best partition of a sequence of layers into stages: pure arithmetic, without torch.

boundaries [s + 1]    stage k has the layers boundaries[k] .. boundaries[k + 1] - 1; no stage is empty
offset                prefix sums of the costs: `offset[j]` is the cost of layers 0 .. j - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from launcher.errors import ConfigError


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Partition layers into contiguous stages, minimising the cost of the most expensive stage.

    Ties are broken by the smallest sum of squares of the stages' costs, then by the smallest sum of squares
    of their numbers of layers, then by fewer layers in the first stages, which hold more microbatches.

    Args:
        costs: cost of each layer, at least 0; integers are summed exactly.
        stages: number of stages, at least 1.

    Returns:
        boundaries [stages + 1], from 0 to len(costs).

    Raises:
        ConfigError: there are fewer layers than stages, or a cost is negative or not finite.
    """
    wrong = [cost for cost in costs if not 0 <= cost < float("inf")]
    if stages < 1 or wrong:
        what = f"{stages} stages" if stages < 1 else f"a cost of {wrong[0]}"
        raise ConfigError(
            f"invalid input for the partition of layers: {what}",
            fix="use at least 1 stage, and finite costs of at least 0",
        )
    if len(costs) < stages:
        noun = "layer cannot" if len(costs) == 1 else "layers cannot"
        raise ConfigError(
            f"{len(costs)} {noun} be split into {stages} stages: each stage needs at least one layer",
            where="pipeline.stages",
            fix=f"use at most {max(1, len(costs))} virtual stage{'s' * (len(costs) > 1)} (stages x chunks)",
        )
    offset = list(accumulate(costs, initial=type(costs[0])(0)))
    return _evenest(offset, stages, _least_peak(offset, stages))


def _least_peak(offset: list[float], stages: int) -> float:
    """Return the cost of the most expensive stage in the best partition."""
    layers = len(offset) - 1
    # peaks[j]: peak cost of the best partition of the first j layers into the stages processed so far.
    # It never decreases with j, and the cost of a last stage from i to j never increases with i. So the best
    # i is where the two cross, and the crossing only moves forward as j grows.
    peaks = offset
    for stage in range(2, stages + 1):
        better = [float("inf")] * (layers + 1)
        i = stage - 1
        for j in range(stage, layers + 1):
            while i + 1 < j and peaks[i] < offset[j] - offset[i]:
                i += 1
            better[j] = max(peaks[i], offset[j] - offset[i])
            if i >= stage:
                better[j] = min(better[j], offset[j] - offset[i - 1])  # i - 1 is just before the crossing
        peaks = better
    return peaks[layers]


def _evenest(offset: list[float], stages: int, peak: float) -> list[int]:
    """Return the partition with the smallest sums of squares among those whose stages cost at most `peak`."""
    layers = len(offset) - 1
    first = [0] * (layers + 1)  # first[j]: earliest begin of a stage that ends before layer j
    for j in range(1, layers + 1):
        first[j] = next(i for i in range(first[j - 1], j) if offset[j] - offset[i] <= peak)
    # Fewest layers of the first s stages, from s = stages down to 1: with fewer, the rest exceeds the peak.
    least = [layers]
    for _ in range(1, stages):
        least.append(first[least[-1]])
    reach = max(j for j in range(layers + 1) if offset[j] <= peak)
    squares = [cost * cost for cost in offset]
    sums = _Sums(1, max(1, least.pop()), reach, squares, [j * j for j in range(layers + 1)], [])
    through = [sums]
    for _ in range(1, stages):
        sums = _one_more(offset, sums, first, least.pop())
        through.append(sums)
    boundaries = [layers]
    for sums in reversed(through[1:]):
        boundaries.append(sums.begins[boundaries[-1]])
    return [0, *reversed(boundaries)]


class _Sums(NamedTuple):
    """The best partitions of the first j layers into `stages` stages, for j from `least` to `reach`.

    Attributes:
        costs, counts: sums of squares of the stages' costs and of their numbers of layers, by j.
        begins: where the last stage begins, by j.
    """

    stages: int
    least: int
    reach: int
    costs: list[float]
    counts: list[int]
    begins: list[int]


def _one_more(offset: list[float], before: _Sums, first: list[int], least: int) -> _Sums:
    """Extend the best partitions by one stage, for j of at least `least`; the new stage begins at `first[j]`
    or later.

    The best begin of the last stage never decreases with j, because squares of sums satisfy the quadrangle
    inequality. So divide and conquer applies: the result for the middle j halves the candidates of all
    others.
    """
    layers, stages = len(offset) - 1, before.stages + 1
    least = max(stages, least)
    reach = max(j for j in range(least, layers + 1) if first[j] <= before.reach)
    after = _Sums(stages, least, reach, [0] * (layers + 1), [0] * (layers + 1), [0] * (layers + 1))
    rows = [(least, reach, before.least, before.reach)]
    while rows:
        low, high, left, right = rows.pop()
        if low > high:
            continue
        j = (low + high) // 2
        cost, count, best = float("inf"), 0, -1
        for i in range(max(left, first[j]), min(right, j - 1) + 1):
            last = offset[j] - offset[i]
            here = before.costs[i] + last * last
            if here > cost:
                continue
            layers_squared = before.counts[i] + (j - i) ** 2
            if here < cost or layers_squared < count:
                cost, count, best = here, layers_squared, i
        after.costs[j], after.counts[j], after.begins[j] = cost, count, best
        rows += [(low, j - 1, left, best), (j + 1, high, best, right)]
    return after


@dataclass(frozen=True)
class Balance:
    """The costs and parameters of the stages of a partition.

    Attributes:
        boundaries: [stages + 1], over the layers.
        costs: cost of each stage, in any unit.
        parameters: parameter elements of each stage.
        seconds: whether costs are in seconds.
    """

    boundaries: tuple[int, ...]
    costs: tuple[float, ...]
    parameters: tuple[int, ...]
    seconds: bool = False

    def lines(self) -> list[str]:
        """Return a line for each stage: its layers, its share of the cost, its parameters in millions, and
        its deviation from the mean cost. Costs in seconds are shown in milliseconds, too."""
        total = sum(self.costs)
        rows = []
        for stage, (begin, end) in enumerate(pairwise(self.boundaries)):
            share = self.costs[stage] / total if total else 1 / len(self.costs)
            off = share * len(self.costs) - 1
            against = (
                "the mean"
                if abs(off) < 0.005
                else f"{abs(off):.0%} {'over' if off > 0 else 'under'} the mean"
            )
            layers = f"layers {begin}-{end - 1}" if end - begin > 1 else f"layer {begin}"
            time = f"{self.costs[stage] * 1e3:.1f} ms, " if self.seconds else ""
            size = f"{self.parameters[stage] / 1e6:.1f} M"
            rows.append((f"stage {stage}", layers, f"{time}{share:.1%}", size, against))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            f"{name:<{widths[0]}}  {layers:<{widths[1]}}  {share:>{widths[2]}} of the cost  "
            f"{size:>{widths[3]}} parameters  {against}"
            for name, layers, share, size, against in rows
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())
