"""DeepSpeed names that programs use before there is an engine. This module does not import the engine."""

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
    """Initialize torch.distributed from the environment or the arguments.

    Args:
        dist_backend: ignored: NCCL is used for CUDA tensors, gloo for CPU tensors. accelerate passes None if
            it has found no accelerator.
        auto_mpi_discovery, verbose, config: unused; ranks started by mpirun are always detected.
        distributed_port: rendezvous port for ranks started by mpirun, if MASTER_PORT is not set.
        timeout: timeout of a collective.
        init_method, rank, world_size: as for torch.distributed.init_process_group().
        dist_init_required: if false, a process group must already exist.

    Raises:
        LauncherError: there is no process group, and `dist_init_required` is false.
    """
    if dist_init_required is False and not dist.is_initialized():
        raise LauncherError(
            "dist_init_required=False, but torch.distributed is not initialized",
            where="deepspeed.init_distributed()",
            fix="call torch.distributed.init_process_group() first, or omit the argument",
        )
    launcher.init_distributed(
        timeout=timeout, init_method=init_method, rank=rank, world_size=world_size, port=distributed_port
    )
    if dist_backend is None:
        _tell_accelerate()


def mpi_discovery(distributed_port: int = PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of mpirun."""
    from launcher.comm.started_by import take_ranks

    take_ranks(port=distributed_port)


def is_initialized() -> bool:
    """Return whether there is a process group.

    accelerate calls this just before it reads its backend, so the backend is set here.
    """
    if dist.is_initialized():
        _tell_accelerate()
    return dist.is_initialized()


def _tell_accelerate() -> None:
    """Set accelerate's backend: on a host without an accelerator it assumes a single process."""
    state = _state_of_accelerate()
    if "backend" in state and state["backend"] is None:
        state["backend"] = "gloo"


def _state_of_accelerate() -> dict[str, Any]:
    """Return accelerate's mutable process state; empty if accelerate has not initialized it yet."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", None)
    return shared if isinstance(shared, dict) else {}


def check_accelerate() -> None:
    """Check accelerate's number of processes: if it is wrong, all ranks train on the same data.

    Raises:
        LauncherError: accelerate's number of processes differs from the world size.
    """
    counted = _state_of_accelerate().get("num_processes")
    if counted is not None and counted != dist.get_world_size():
        raise LauncherError(
            f"accelerate counts {counted} processes, but there are {dist.get_world_size()} ranks: all would train on "
            "the same data",
            fix="pass TrainingArguments(use_cpu=True) on a machine without a GPU, and do not set ACCELERATE_USE_CPU",
        )
