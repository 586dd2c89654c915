"""The part of a model that one rank holds, split over tp and cut into stages on meta by the engine's code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from launcher.comm import Axis, Mesh
from launcher.config import Config
from launcher.engine.assemble import split_layers, spread_experts
from launcher.engine.policy import axes_of
from launcher.engine.staging import holders_of
from launcher.estimate.model_trace import CPU
from launcher.estimate.short_model import shallow
from launcher.models.units import unit_modules
from launcher.pipeline.hf.costs import deal, model_costs
from launcher.pipeline.hf.staged import StagedModel
from launcher.pipeline.schedules import drained, schedule
from launcher.tensor.split import Split
from launcher.zero import ShardAxes


@dataclass(frozen=True)
class RankPart:
    """The part of a model that a rank holds.

    Args:
        model: model on meta, split over tp and cut into stages.
        splits: see `SplitModel`; includes those of experts.
        expert_axes: axes of the ranks that hold the same experts; None without expert parallelism.
        experts: names of the expert parameters.
        names: names of all blocks of the full model.
        blocks: blocks of this rank.
        holders: see `holders_of`.
        boundaries: block index at which each virtual stage begins, and the end [virtual stages + 1].
        rank_of: pipeline rank of each virtual stage.
        names_of: see `StagedPart`.
    """

    model: nn.Module
    splits: Mapping[str, Split]
    expert_axes: ShardAxes | None
    experts: frozenset[str]
    names: tuple[str, ...]
    blocks: list[tuple[str, nn.Module]]
    holders: Mapping[str, Axis]
    boundaries: tuple[int, ...]
    rank_of: tuple[int, ...]
    names_of: Callable[[int], Collection[str] | None]


class RankParts:
    """The parts of a model, created on demand and cached.

    Args:
        model: the full model on meta; not modified.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._split: dict[Any, _Spread] = {}
        self._known: dict[Any, RankPart] = {}

    def of(self, config: Config, mesh: Mesh, sequence: int) -> RankPart:
        """Return the part of the mesh's rank.

        Args:
            config: resolved configuration.
            sequence: sequence length in tokens; the costs of blocks depend on it.
        """
        tp, pp, section = mesh.axes["tp"], mesh.axes["pp"], config.pipeline
        size = config.expert_parallel.degree
        ep = mesh.split_for_experts(size)[1].rank if size > 1 else 0
        split = (
            tp.degree,
            tp.rank,
            repr(config.tensor_parallel),
            size,
            ep,
            mesh.dp_cp.degree if size > 1 else 0,
        )
        cut = (section.chunks_of_rank, section.schedule, section.partition, sequence if pp.degree > 1 else 0)
        key = (split, pp.degree, pp.rank, *cut)
        if key not in self._known:
            if split not in self._split:
                model = shallow(self._model)
                spread, axes = spread_experts(model, mesh, config, axes_of(config, mesh))
                alone = Mesh.planned(CPU, tp.degree, tp.rank, tp=tp.degree)
                layers = split_layers(model, alone, config, spread.splits)
                splits = {**layers.splits, **spread.splits}
                self._split[split] = _Spread(model, splits, axes, frozenset(spread.splits))
            self._known[key] = _cut(self._split[split], config, mesh, sequence)
        return self._known[key]


@dataclass(frozen=True)
class _Spread:
    """A model with split layers and experts; see `RankPart`."""

    model: nn.Module
    splits: Mapping[str, Split]
    expert_axes: ShardAxes | None
    experts: frozenset[str]


def _cut(spread: _Spread, config: Config, mesh: Mesh, sequence: int) -> RankPart:
    model, alike = spread.model, (spread.splits, spread.expert_axes, spread.experts)
    blocks, pp, section = unit_modules(model), mesh.axes["pp"], config.pipeline
    names = tuple(name for name, _ in blocks)
    if pp.degree == 1:
        return RankPart(model, *alike, names, blocks, {}, (0, len(names)), (0,), lambda stage: None)
    method = "best" if section.partition == "profile" else section.partition
    costs = model_costs(model, method, sequence=sequence, tp=mesh.axes["tp"].degree)
    boundaries = deal(costs, pp.degree * section.chunks_of_rank)
    rank_of = schedule(drained(section.schedule), pp.degree, 1, section.chunks_of_rank).rank_of
    owners = [
        rank
        for rank, (begin, end) in zip(rank_of, pairwise(boundaries), strict=True)
        for _ in range(begin, end)
    ]
    # Blocks of other ranks are copied empty: there may be a hundred blocks, and each layout needs a copy.
    model = shallow(
        model, [block for (_, block), rank in zip(blocks, owners, strict=True) if rank != pp.rank]
    )
    staged = StagedModel(model, boundaries, rank_of, pp.rank)
    return RankPart(
        model,
        *alike,
        names,
        staged.blocks,
        holders_of(staged, mesh),
        tuple(boundaries),
        tuple(rank_of),
        staged.names_of,
    )
