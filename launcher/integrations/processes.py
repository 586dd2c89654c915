"""Names of DeepSpeed's that a program uses before there is an engine, and that import none."""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import launcher
from launcher.errors import LauncherError

logger = logging.getLogger("launcher")
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
PORT = 29500  # DeepSpeed's default
WAIT = timedelta(minutes=30)  # DeepSpeed's default


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = WAIT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed from the environment, or as the arguments say.

    Args:
        dist_backend: not needed: NCCL for CUDA tensors, gloo for CPU tensors. None is what accelerate says where it
            has found no accelerator.
        auto_mpi_discovery, verbose, config: not needed; ranks of mpirun are always found.
        distributed_port: where ranks of mpirun meet, if MASTER_PORT does not say it.
        timeout: of a collective.
        init_method, rank, world_size: as for torch.distributed.init_process_group().
        dist_init_required: false: there must be a process group already.

    Raises:
        LauncherError: there is none, and none is to be made.
    """
    if dist_init_required is False and not dist.is_initialized():
        raise LauncherError(
            "there is no process group, and dist_init_required=False asks that none is made",
            where="deepspeed.init_distributed()",
            fix="start it before with torch.distributed.init_process_group(), or leave the argument out",
        )
    launcher.init_distributed(
        timeout=timeout, init_method=init_method, rank=rank, world_size=world_size, port=distributed_port
    )
    if dist_backend is None:
        _tell_accelerate()


def mpi_discovery(distributed_port: int = PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT by what mpirun set."""
    from launcher.comm.started_by import take_ranks

    take_ranks(port=distributed_port)


def is_initialized() -> bool:
    """Return whether there is a process group. accelerate asks just before it looks for its backend."""
    if dist.is_initialized():
        _tell_accelerate()
    return dist.is_initialized()


def _tell_accelerate() -> None:
    """Set accelerate's backend: on a host without an accelerator it believes that there is one process."""
    state = _state_of_accelerate()
    if "backend" in state and state["backend"] is None:
        state["backend"] = "gloo"


def _state_of_accelerate() -> dict[str, Any]:
    """Return what it has found out about the processes, to be changed; empty where it has not looked yet."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    return shared if isinstance(shared, dict) else {}


def check_accelerate() -> None:
    """Check that every rank knows that it is one of several, or all train on the same data.

    Raises:
        LauncherError: accelerate counts other processes than there are.
    """
    counted = _state_of_accelerate().get("num_processes")
    if counted is not None and counted != dist.get_world_size():
        raise LauncherError(
            f"accelerate counts {counted} processes, and there are {dist.get_world_size()} ranks: each would train on "
            "the same data",
            fix="pass TrainingArguments(use_cpu=True) on a machine without a GPU, and do not set ACCELERATE_USE_CPU",
        )
