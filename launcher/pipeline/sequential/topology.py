"""DeepSpeed's process topologies: ranks by coordinates, as arithmetic; the mesh is `launcher.comm.Mesh`."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist

from launcher.errors import ConfigError

OUR_AXES = ("pipe", "data", "model")


class ProcessTopology:
    """Ranks 0 .. n - 1 in row-major order: the last axis varies fastest.

    Args:
        axes: names of the axes, outermost first.
        dims: degree of each axis.

    Raises:
        ConfigError: the numbers of names and degrees differ, a name occurs twice, or a degree is below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise ConfigError(
                f"invalid topology: axes {list(axes)} with degrees {list(dims)}",
                where="ProcessTopology(axes, dims)",
                fix="give each axis a unique name and a degree of at least 1",
            )
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord = cast(Any, namedtuple("ProcessCoord", axes))  # type: ignore[misc]
        self._coords = [self.ProcessCoord(*numbers) for numbers in itertools.product(*map(range, dims))]
        self._ranks = {coord: rank for rank, coord in enumerate(self._coords)}

    def world_size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, outermost first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Return the degree of an axis; 0 if there is no such axis, as in DeepSpeed."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coords: int) -> int:
        """Return the rank at a coordinate of every axis.

        Raises:
            ConfigError: an axis is missing or unknown, or a coordinate is out of range.
        """
        if set(coords) != set(self.axes):
            raise ConfigError(
                f"get_rank({', '.join(coords)}) needs the axes {', '.join(self.axes)}",
                fix="pass a coordinate for each axis; filter_match() accepts a subset",
            )
        rank = self._ranks.get(self.ProcessCoord(**coords))
        if rank is None:
            raise ConfigError(f"{coords} is out of range for {dict(zip(self.axes, self.dims, strict=True))}")
        return rank

    def get_coord(self, rank: int) -> Any:
        """Return a named tuple of the coordinates of a rank.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < len(self._coords):
            raise ConfigError(f"rank {rank} is out of range: the topology has {len(self._coords)} ranks")
        return self._coords[rank]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return a rank's coordinates for a file name: `model_00-seq_01`, without the axes in `omit_axes`."""
        coord = self.get_coord(rank)
        shown = [axis for axis in self.get_axis_names() if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def filter_match(self, **coords: int) -> list[int]:
        """Return the ranks that have these coordinates."""
        return [
            rank
            for rank, coord in enumerate(self._coords)
            if all(getattr(coord, axis) == value for axis, value in coords.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one coordinate of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ along `axis` only; [] if there is no such axis."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        spans = itertools.product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, numbers, strict=True))) for numbers in spans]

    def __str__(self) -> str:
        return str(self._ranks)


class PipeDataParallelTopology(ProcessTopology):
    """Stages outermost: data-parallel ranks are consecutive."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages outermost, tensor-parallel ranks innermost: the rank order of every run of this package."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def stage_of_this_rank(stages: int | None) -> int | None:
    """Return the stage of this rank, with stages outermost; None if there is no process group, or if the
    number of stages is unknown or does not divide the world size."""
    if stages is None or not dist.is_initialized() or dist.get_world_size() % stages:
        return None
    return dist.get_rank() * stages // dist.get_world_size()


def stages_of(num_stages: int | None, topology: ProcessTopology | None) -> int | None:
    """Return the number of stages that the arguments of a PipelineModule specify; None: they specify none.

    Raises:
        ConfigError: the arguments contradict each other, or the axes of the topology are not supported.
    """
    if topology is not None:
        axes = [axis for axis in OUR_AXES if axis in topology.axes]
        if axes != topology.axes or "pipe" not in axes:
            raise ConfigError(
                f"unsupported topology axes {topology.axes}",
                where="PipelineModule(topology=...)",
                fix="use the axes pipe, data and model, in this order; data and model are optional",
            )
        if num_stages not in (None, topology.get_dim("pipe")):
            raise ConfigError(
                f"num_stages {num_stages} contradicts the topology, whose axis pipe has {topology.get_dim('pipe')}",
                where="PipelineModule(num_stages=..., topology=...)",
                fix="pass only one of the two",
            )
        return topology.get_dim("pipe")
    if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 1):
        raise ConfigError(
            f"num_stages is {num_stages!r}", where="PipelineModule", fix="pass an integer of at least 1"
        )
    return num_stages
