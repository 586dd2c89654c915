"""`deepspeed.utils.groups`: sizes, ranks and process groups of the newest engine; of all ranks before there is one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from launcher.comm import Axis
from launcher.engine.fragments import ENGINES


def _axis(name: str) -> Axis:
    if ENGINES:
        mesh = max(ENGINES, key=lambda engine: engine.zero.serial).mesh
        return mesh.dp if name == "dp" else mesh.axes[name]
    if name != "dp" or not dist.is_initialized():
        return Axis(name)
    return Axis("dp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, dist.group.WORLD)


def get_data_parallel_group() -> Any:
    return _axis("dp").group


def get_data_parallel_world_size() -> int:
    return _axis("dp").degree


def get_data_parallel_rank() -> int:
    return _axis("dp").rank


def get_tensor_model_parallel_group() -> Any:
    return _axis("tp").group


def get_tensor_model_parallel_world_size() -> int:
    return _axis("tp").degree


def get_tensor_model_parallel_rank() -> int:
    return _axis("tp").rank


def get_tensor_model_parallel_src_rank() -> int:
    """The rank, among all, of the first rank of this one's tensor-parallel group."""
    group = _axis("tp").group
    if group is not None:
        return min(dist.get_process_group_ranks(group))
    return dist.get_rank() if dist.is_initialized() else 0


def get_pipeline_model_parallel_world_size() -> int:
    return _axis("pp").degree


def get_pipeline_model_parallel_rank() -> int:
    return _axis("pp").rank


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank
