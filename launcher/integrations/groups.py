"""`deepspeed.utils.groups`: ranks and process groups of the newest engine; without one, of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from launcher.comm import Axis, Mesh
from launcher.comm.groups import or_alone
from launcher.engine.fragments import ENGINES
from launcher.errors import ArgumentsError


def _newest_mesh() -> Mesh | None:
    return max(ENGINES, key=lambda engine: engine.zero.serial).mesh if ENGINES else None


def _axis(name: str) -> Axis:
    mesh = _newest_mesh()
    if mesh is not None:
        return mesh.axes[name]
    if name != "dp" or not dist.is_initialized():
        return Axis(name)
    return Axis.over("dp")


def _group(axis: Axis) -> Any:
    return or_alone(axis.group)


def get_data_parallel_group() -> Any:
    return _group(_axis("dp"))


def get_data_parallel_world_size() -> int:
    return _axis("dp").degree


def get_data_parallel_rank() -> int:
    return _axis("dp").rank


def get_tensor_model_parallel_group() -> Any:
    return _group(_axis("tp"))


def get_tensor_model_parallel_world_size() -> int:
    return _axis("tp").degree


def get_tensor_model_parallel_rank() -> int:
    return _axis("tp").rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this rank's tensor-parallel group."""
    group = get_tensor_model_parallel_group()
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


# ---- DeepSpeed's private names ---------------------------------------------------------------------

_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_tensor_model_parallel_world_size


def _get_data_parallel_group_ranks() -> list[int]:
    """Return the global ranks of this rank's data-parallel group."""
    group = get_data_parallel_group()
    if group is not None:
        return dist.get_process_group_ranks(group)
    return [dist.get_rank() if dist.is_initialized() else 0]


def _get_broadcast_src_rank() -> int:
    """Return the first global rank of this rank's data-parallel group."""
    return _get_data_parallel_group_ranks()[0]


# Expert parallelism: all MoE layers are sharded over the same ranks, so `group_name` is ignored.


def _get_expert_parallel_group(group_name: str = "") -> Any:
    """Return the group of ranks that hold different experts."""
    return _group(_experts("ep"))


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    return _experts("ep").degree


def _get_expert_parallel_rank(group_name: str = "") -> int:
    return _experts("ep").rank


def _get_expert_data_parallel_group(group_name: str = "") -> Any:
    """Return the group of ranks that hold the same experts."""
    return _group(_experts("edp"))


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    return _experts("edp").degree


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    return _experts("edp").rank


def _get_max_expert_size() -> int:
    return _experts("ep").degree


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group()


def _experts(name: str) -> Axis:
    mesh = _newest_mesh()
    if mesh is not None and name in mesh.experts:
        return mesh.experts[name]
    return replace(_all_copies(), name=name) if name == "edp" else Axis(name)


# Ranks that share a sequence hold the same model; gradients are averaged over them and the dp ranks.


def _get_sequence_parallel_world_size() -> int:
    return _sequence_axis().degree


def _get_sequence_parallel_rank() -> int:
    return _sequence_axis().rank


def _get_sequence_parallel_group() -> Any:
    """Return the group of ranks that share this rank's sequences.

    Raises:
        ArgumentsError: sequences are not sharded.
    """
    group = _sequence_axis().group
    if group is None:
        raise ArgumentsError(
            "sequence parallelism is not enabled, so there is no sequence-parallel group",
            where="deepspeed.utils.groups",
            fix='set "sequence_parallel_size" in the JSON, or pass initialize(mpu=...)',
        )
    return group


def _get_sequence_data_parallel_group() -> Any:
    return _group(_all_copies())


def _get_sequence_data_parallel_world_size() -> int:
    return _all_copies().degree


def _get_sequence_data_parallel_rank() -> int:
    return _all_copies().rank


def _sequence_axis() -> Axis:
    """Return the cp axis of the newest engine; if its degree is 1, that of the groups the script created."""
    found = _axis("cp")
    made = sys.modules.get("launcher.integrations.sequence_groups")
    if found.degree == 1 and made is not None and (groups := made.newest()) is not None:
        return Axis.over("cp", groups.group)
    return found


def _all_copies() -> Axis:
    mesh = _newest_mesh()
    return _axis("dp") if mesh is None else mesh.dp_cp


# ---- with Megatron's mpu ----------------------------------------------------------------------------


def _of_unit(otherwise: Any, *names: str) -> Callable[..., Any]:
    """Return a function that calls the first of these methods that an mpu has; names vary by version."""

    def ask(mpu: Any = None) -> Any:
        found = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
        return otherwise if found is None else found()

    return ask


def _tensor(what: str) -> tuple[str, ...]:
    return tuple(f"get_{kind}_parallel_{what}" for kind in ("tensor_model", "slice", "model"))


def _pipeline(what: str) -> tuple[str, ...]:
    return tuple(f"get_{kind}_parallel_{what}" for kind in ("pipeline_model", "pipe"))


bwc_tensor_model_parallel_rank = _of_unit(0, *_tensor("rank"))
bwc_tensor_model_parallel_world_size = _of_unit(1, *_tensor("world_size"))
bwc_tensor_model_parallel_group = _of_unit(None, *_tensor("group"))
bwc_pipeline_parallel_world_size = _of_unit(1, *_pipeline("world_size"))
bwc_pipeline_parallel_group = _of_unit(None, *_pipeline("group"))
