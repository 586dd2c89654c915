"""`deepspeed.comm`: torch.distributed with DeepSpeed's names and extra arguments, plus a few more functions.

The arguments `prof`, `log_name` and `debug` of DeepSpeed's call log are accepted and ignored. The
`comms_logger` section enables logging of the engine's communication instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.comm import log_summary, pick_device
from launcher.errors import LauncherError
from launcher.integrations.processes import init_distributed, is_initialized

F = TypeVar("F", bound=Callable[..., Any])
ReduceOp, ProcessGroup, P2POp = dist.ReduceOp, dist.ProcessGroup, dist.P2POp
LOG = ("prof", "log_name", "debug")

__all__ = ["init_distributed", "is_initialized", "log_summary"]


def _quiet(function: F) -> F:
    """Return a wrapper of the function that accepts and drops DeepSpeed's logging arguments."""

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{key: value for key, value in keywords.items() if key not in LOG})

    return call  # type: ignore[return-value]


broadcast, broadcast_object_list = _quiet(dist.broadcast), _quiet(dist.broadcast_object_list)
all_gather, all_gather_object = _quiet(dist.all_gather), _quiet(dist.all_gather_object)
all_gather_into_tensor = _quiet(dist.all_gather_into_tensor)
reduce_scatter, reduce_scatter_tensor = _quiet(dist.reduce_scatter), _quiet(dist.reduce_scatter_tensor)
all_to_all, all_to_all_single = _quiet(dist.all_to_all), _quiet(dist.all_to_all_single)
all_reduce, reduce = _quiet(dist.all_reduce), _quiet(dist.reduce)
gather, scatter = _quiet(dist.gather), _quiet(dist.scatter)
send, recv, isend, irecv = _quiet(dist.send), _quiet(dist.recv), _quiet(dist.isend), _quiet(dist.irecv)
batch_isend_irecv = _quiet(dist.batch_isend_irecv)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, **log: Any
) -> Any:
    """All-gather the tensors of all ranks into one."""
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **log: Any,
) -> Any:
    """Reduce-scatter a tensor: each rank gets its part of the reduced result."""
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def barrier(
    group: Any = None, async_op: bool = False, device_ids: list[int] | None = None, **log: Any
) -> Any:
    """Wait until every rank of the group reaches the barrier; a no-op without a process group."""
    return dist.barrier(group, async_op, device_ids) if dist.is_initialized() else None


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, **log: Any
) -> None:
    """Run a barrier that reports the ranks that do not arrive. On an NCCL group it is a plain barrier, as in
    DeepSpeed."""
    if dist.get_backend(group) == dist.Backend.NCCL:
        dist.barrier(group)
    else:
        dist.monitored_barrier(group, timeout, wait_all_ranks)


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """All-reduce a tensor in place. DeepSpeed uses shared memory for this call."""
    return dist.all_reduce(tensor, op, group)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **log: Any,
) -> Any:
    """All-reduce every tensor in place."""
    return _Works([dist.all_reduce(tensor, op, group, async_op=True) for tensor in tensors]).given(async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Run all_gather_into_tensor for every pair of tensors."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _Works([dist.all_gather_into_tensor(out, one, group, async_op=True) for out, one in pairs]).given(
        async_op
    )


class _Works:
    """Several collectives with a single wait()."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def given(self, async_op: bool) -> _Works | None:
        """Return this object if `async_op`; otherwise wait and return None."""
        if async_op:
            return self
        self.wait()
        return None

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# ---- ranks and groups ----------------------------------------------------------------------------


def is_available() -> bool:
    return dist.is_available()


def new_group(ranks: Sequence[int], *others: Any, **keywords: Any) -> Any:
    """Create a process group; every rank must call this."""
    return dist.new_group(list(ranks), *others, **keywords)


def get_world_group() -> Any:
    return dist.group.WORLD


def get_rank(group: Any = None) -> int:
    """Return the rank of this process in the group; before initialization, RANK from the environment."""
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", 0))


def get_world_size(group: Any = None) -> int:
    """Return the size of the group; before initialization, WORLD_SIZE from the environment."""
    return dist.get_world_size(group) if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def get_local_rank() -> int:
    """Return the rank of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


get_local_rank_from_launcher = get_local_rank


def get_world_rank_from_launcher() -> int:
    return int(os.environ.get("RANK", 0))


def get_world_size_from_launcher() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the global rank of a rank in the group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of the group."""
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return a torch device mesh over all ranks."""
    return init_device_mesh(pick_device().type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def destroy_process_group(group: Any = None) -> None:
    dist.destroy_process_group(group)


# ---- capabilities --------------------------------------------------------------------------------


class TorchBackend:
    """Provides torch.distributed's single-tensor all-gather and reduce-scatter. Groups are torch's own."""

    @classmethod
    def get_all_gather_function(cls) -> Callable[..., Any]:
        return dist.all_gather_into_tensor

    @classmethod
    def get_reduce_scatter_function(cls) -> Callable[..., Any]:
        return dist.reduce_scatter_tensor


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor


def has_all_reduce_coalesced() -> bool:
    """Return True: this module defines `all_reduce_coalesced` and does not use torch's deprecated one."""
    return True


def has_coalescing_manager() -> bool:
    return hasattr(dist.distributed_c10d, "_coalescing_manager")


def configure(deepspeed_config: Any = None, enabled: bool | None = None, **keywords: Any) -> None:
    """Accept a call that enables no logging; logging of collectives is enabled in the config.

    Raises:
        LauncherError: an argument would enable logging.
    """
    if enabled or any(keywords.values()):
        raise LauncherError(
            "deepspeed.comm.configure() cannot enable logging; set comms_logger in the config",
            where="deepspeed.comm.configure()",
            fix='add {"comms_logger": {"enabled": true}} to the JSON',
        )


def in_aml() -> bool:
    """Return whether this process runs on Azure ML."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return whether this process runs on SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    return "DLTS_JOB_ID" in os.environ


def is_parallel(group: Any = None) -> bool:
    """Return whether a group has more than one rank."""
    return dist.is_initialized() and dist.get_world_size(group) > 1
