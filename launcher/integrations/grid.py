"""`deepspeed.runtime.pipe.topology`: the pipeline grid, and rank functions of the newest engine."""

from __future__ import annotations

from launcher.integrations import groups
from launcher.pipeline.sequential.grid import PipelineParallelGrid

__all__ = [
    "PipelineParallelGrid",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_slice_parallel_rank",
]

get_data_parallel_rank = groups.get_data_parallel_rank
get_data_parallel_world_size = groups.get_data_parallel_world_size
get_pipe_parallel_rank = groups.get_pipeline_model_parallel_rank
get_pipe_parallel_world_size = groups.get_pipeline_model_parallel_world_size
get_slice_parallel_rank = groups.get_tensor_model_parallel_rank
