"""`deepspeed.runtime.pipe.topology.PipelineParallelGrid`: ranks and process groups of a topology, for models that ask.

The groups of the run's own mesh are in the engine; this grid makes its own, and every rank must make it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from launcher.errors import ConfigError
from launcher.integrations import groups
from launcher.pipeline.sequential.topology import PipeDataParallelTopology, ProcessTopology

get_data_parallel_rank = groups.get_data_parallel_rank
get_data_parallel_world_size = groups.get_data_parallel_world_size
get_pipe_parallel_rank = groups.get_pipeline_model_parallel_rank
get_pipe_parallel_world_size = groups.get_pipeline_model_parallel_world_size
get_slice_parallel_rank = groups.get_tensor_model_parallel_rank


class PipelineParallelGrid:
    """This rank's place in a topology of pipe, data and (maybe) model.

    Args:
        topology: default: all ranks along data.
        process_group: of the ranks; not needed.

    Raises:
        ConfigError: the topology has another number of ranks than there are.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        if self._topo.world_size() != self.world_size:
            raise ConfigError(
                f"the topology has {self._topo.world_size()} ranks, and there are {self.world_size}",
                where="PipelineParallelGrid(topology=...)",
                fix="make the product of its degrees the number of ranks",
            )
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
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
        mine, group = [self.global_rank], None
        for ranks in lists:
            made = dist.new_group(ranks)
            if self.global_rank in ranks:
                mine, group = ranks, made
        return lists, mine, group

    def _share_batches(self) -> None:
        """Return the ranks that hold parts of one model."""
        for number in range(self.data_parallel_size):
            ranks = (
                self._topo.get_axis_list("data", number)
                if "data" in self._topo.axes
                else list(range(self.world_size))
            )
            made = dist.new_group(ranks)
            if self.global_rank in ranks:
                self.ds_model_proc_group, self.ds_model_world_size = made, len(ranks)
                self.ds_model_rank = ranks.index(self.global_rank)

    @property
    def topology(self) -> ProcessTopology:
        return self._topo

    def _place(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def get_stage_id(self) -> int:
        return self._place("pipe")

    def get_data_parallel_id(self) -> int:
        return self._place("data")

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank at another stage with this one's other coordinates."""
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
