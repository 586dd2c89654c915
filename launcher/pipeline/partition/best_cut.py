"""The best cut of a row of layers into stages: arithmetic, without torch.

boundaries [s + 1]    stage k has the layers boundaries[k] .. boundaries[k + 1] - 1; none is empty
offset                boundaries of the first layers: `offset[j]` is the cost of layers 0 .. j - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from launcher.errors import ConfigError


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Cut layers into neighbouring parts: the dearest stage is as cheap as can be; among those cuts the squares of the
    stages' costs have the smallest sum; among those the squares of their numbers of layers. Of equal cuts
    the one with fewer layers in front is taken: the first stages keep more microbatches.

    Args:
        costs: of each layer, at least 0; whole numbers are summed exactly.
        stages: at least 1.

    Returns:
        boundaries [stages + 1], from 0 to len(costs).

    Raises:
        ConfigError: there are fewer layers than stages, or a cost is negative or no number.
    """
    wrong = [cost for cost in costs if not 0 <= cost < float("inf")]
    if stages < 1 or wrong:
        what = f"{stages} stages" if stages < 1 else f"a cost of {wrong[0]}"
        raise ConfigError(f"layers cannot be divided with {what}", fix="costs are finite and not negative")
    if len(costs) < stages:
        noun = "layer cannot" if len(costs) == 1 else "layers cannot"
        raise ConfigError(
            f"{len(costs)} {noun} be divided among {stages} stages: every stage needs one",
            where="pipeline.stages",
            fix=f"take at most {max(1, len(costs))} stages; stages x chunks are counted",
        )
    offset = list(accumulate(costs, initial=type(costs[0])(0)))
    return _evenest(offset, stages, _least_peak(offset, stages))


def _least_peak(offset: list[float], stages: int) -> float:
    """Return the cost of the dearest stage in the best cut."""
    layers = len(offset) - 1
    # peaks[j]: of the best cut of the first j layers into as many stages as were gone through. It never falls with j,
    # and the cost of a last stage from i to j never rises with i: the best i is where the two cross, and that moves on
    # with j.
    peaks = offset
    for stage in range(2, stages + 1):
        better = [float("inf")] * (layers + 1)
        i = stage - 1
        for j in range(stage, layers + 1):
            while i + 1 < j and peaks[i] < offset[j] - offset[i]:
                i += 1
            better[j] = max(peaks[i], offset[j] - offset[i])
            if i >= stage:
                better[j] = min(better[j], offset[j] - offset[i - 1])  # i - 1 lies before the crossing
        peaks = better
    return peaks[layers]


def _evenest(offset: list[float], stages: int, peak: float) -> list[int]:
    """Return the cut with the smallest sums of squares among those whose stages cost at most `peak`."""
    layers = len(offset) - 1
    first = [0] * (layers + 1)  # of a stage that ends before j
    for j in range(1, layers + 1):
        first[j] = next(i for i in range(first[j - 1], j) if offset[j] - offset[i] <= peak)
    least = [layers]  # in the first s stages, read backwards: with fewer, the others do not fit into the rest
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
    """The best cuts of the first j layers into so many stages, for j from `least` to `reach`.

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
    """Return the best cuts of at least so many layers with one stage more, whose first layer is at least `first[j]`.

    Where the best last stage begins never falls with j, for squares of sums obey the quadrangle inequality: the middle
    row halves the choices of all others.
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
    """The costs and parameters of the stages of a cut.

    Attributes:
        boundaries: [stages + 1], over the layers.
        costs: of each stage, in any unit.
        parameters: elements of each stage.
        seconds: the unit is known to be that.
    """

    boundaries: tuple[int, ...]
    costs: tuple[float, ...]
    parameters: tuple[int, ...]
    seconds: bool = False

    def lines(self) -> list[str]:
        """Return a line for each stage: its layers, its share of the cost against the mean, its parameters in millions.
        A cost in seconds stands there in milliseconds, too."""
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
