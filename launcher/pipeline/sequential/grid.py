"""This rank's coordinates and process groups along pp, dp and tp, under DeepSpeed's names: `engine.grid`, and
`deepspeed.runtime.pipe.topology.PipelineParallelGrid` for models that need them before the engine exists."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist

from launcher.comm import Mesh
from launcher.comm.groups import or_alone
from launcher.errors import ConfigError, LauncherError
from launcher.pipeline.sequential.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

AXES = {"pipe": "pp", "data": "dp", "sequence": "cp", "model": "tp"}
"""Axis names of a topology -> axis names of the mesh; outermost first."""


def _topology_of(mesh: Mesh) -> ProcessTopology:
    """Return the topology of a mesh, as DeepSpeed's class if there is no sequence axis, which that class does
    not have."""
    degrees = {name: mesh.axes[axis].degree for name, axis in AXES.items()}
    if degrees["sequence"] > 1:
        return ProcessTopology(list(degrees), list(degrees.values()))
    return PipeModelDataParallelTopology(degrees["pipe"], degrees["model"], degrees["data"])


class PipelineParallelGrid:
    """This rank's coordinates in a topology of pipe, data and optionally model.

    Args:
        topology: default: all ranks along data. Its process groups are created, so every rank must create the
            grid.
        process_group: group of the ranks; ignored.
        mesh: mesh of an engine, in place of a topology; its groups are reused.

    Raises:
        ConfigError: the topology does not have world size ranks.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, mesh: Mesh | None = None
    ) -> None:
        self._mesh = mesh
        if mesh is not None:
            self.global_rank, self.world_size = mesh.rank, mesh.world_size
            topology = _topology_of(mesh)
        else:
            self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ConfigError(
                f"the topology has {self._topo.world_size()} ranks, but the run has {self.world_size}",
                where="PipelineParallelGrid(topology=...)",
                fix="make the product of its degrees equal to the number of ranks",
            )
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self._place("data")
        self.dp_groups, self.dp_group, self.dp_proc_group = self._along("data")
        self.pipe_groups, self.pp_group, self.pp_proc_group = self._along("pipe")
        self.model_groups, self.slice_group, self.slice_proc_group = self._along("model")
        self.mp_group = self.slice_group
        self._share_batches()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

    def _along(self, axis: str) -> tuple[list[list[int]], list[int], Any]:
        """Return all groups of an axis, this rank's, and its process group; a missing axis has groups of one."""
        lists = self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]
        if self._mesh is not None:
            group = self._mesh.axes[AXES[axis]].group
            mine = [self.global_rank] if group is None else dist.get_process_group_ranks(group)
            return lists, mine, or_alone(group)
        mine, group = [self.global_rank], None
        for ranks in lists:
            made = dist.new_group(ranks)
            if self.global_rank in ranks:
                mine, group = ranks, made
        return lists, mine, group

    def _share_batches(self) -> None:
        """Determine the ranks that hold parts of the same model replica."""
        others = [axis for axis in ("data", "sequence") if axis in self._topo.axes]
        spans = itertools.product(*(range(self._topo.get_dim(axis)) for axis in others))
        lists = [self._topo.filter_match(**dict(zip(others, numbers, strict=True))) for numbers in spans]
        for ranks in lists:
            made = None if self._mesh is not None else dist.new_group(ranks)
            if self.global_rank in ranks:
                self.ds_model_proc_group, self.ds_model_world_size = made, len(ranks)
                self.ds_model_rank = ranks.index(self.global_rank)
        if self._mesh is not None and 1 in (self.pipe_parallel_size, self.slice_parallel_size):
            along = self.slice_proc_group if self.pipe_parallel_size == 1 else self.pp_proc_group
            self.ds_model_proc_group = along

    def topology(self) -> ProcessTopology:
        return self._topo

    def _place(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def get_stage_id(self) -> int:
        return self._place("pipe")

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank at another stage with otherwise the same coordinates as this rank."""
        place = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**place, "pipe": stage_id, **kwargs})

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Return the process group of the ranks that hold parts of the same model replica.

        Raises:
            LauncherError: the grid is of an engine with both stages and tensor-parallel ranks, which has no
                such group.
        """
        if self.ds_model_proc_group is None and self.ds_model_world_size > 1:
            raise LauncherError(
                "the engine has no combined process group of pipeline stages and tensor-parallel ranks",
                where="grid.get_model_parallel_group()",
                fix="use get_pipe_parallel_group() and get_slice_parallel_group() one after the other",
            )
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        return self._place("model")

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
