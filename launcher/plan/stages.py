"""The pipeline stages of a layout, cut as in a run, and their shares of the forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from launcher.pipeline.hf.costs import LayerCosts, deal, with_ends
from launcher.pipeline.schedules import drained, schedule
from launcher.plan.layout import Layout
from launcher.plan.work import ModelWork


class StageLoad(NamedTuple):
    """The part of a forward in one virtual stage, or in all virtual stages of a rank.

    Attributes:
        flops: FLOPs per sequence; the ends of the model belong to the first and the last stage.
        ends: the part of `flops` in the ends, which are never recomputed.
        blocks: number of blocks.
    """

    flops: float
    ends: float
    blocks: float


@dataclass(frozen=True)
class StageLoads:
    """The loads of all virtual stages.

    Args:
        virtual: load of each virtual stage, in the order of the model.
        rank_of: pipeline rank of each virtual stage.
    """

    virtual: tuple[StageLoad, ...]
    rank_of: tuple[int, ...]

    @cached_property
    def ranks(self) -> list[StageLoad]:
        """Return the load of each pipeline rank."""
        return [
            StageLoad(*map(sum, zip(*(load for load, owner in self._owned() if owner == rank), strict=True)))
            for rank in range(max(self.rank_of) + 1)
        ]

    @cached_property
    def busiest(self) -> tuple[int, StageLoad]:
        """Return the pipeline rank with the most computation, for which the others wait, and its load."""
        return max(enumerate(self.ranks), key=lambda each: each[1].flops)

    def _owned(self) -> zip[tuple[StageLoad, int]]:
        return zip(self.virtual, self.rank_of, strict=True)


def stage_loads(work: ModelWork, layout: Layout) -> StageLoads:
    """Return the loads of a layout's virtual stages."""
    return _cut(work, layout.schedule, layout.pp, layout.chunks)


@lru_cache(maxsize=4096)
def _cut(work: ModelWork, name: str, stages: int, chunks: int) -> StageLoads:
    given = work.costs or LayerCosts(0, (1.0,) * work.layers, 0)
    costs, boundaries = with_ends(given), deal(given, stages * chunks)
    unit = work.flops / sum(costs)
    loads = [
        StageLoad(
            unit * sum(costs[begin:end]),
            unit * (sum(costs[begin:end]) - sum(given.blocks[begin:end])),
            end - begin,
        )
        for begin, end in pairwise(boundaries)
    ]
    wanted = chunks if name == "interleaved" else None
    return StageLoads(tuple(loads), tuple(schedule(drained(name), stages, 1, wanted).rank_of))
