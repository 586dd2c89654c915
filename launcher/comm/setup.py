"""Initialization of the default process group, and the device of this rank, from the environment."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.comm.started_by import PORT, check_arguments, take_arguments, take_ranks
from launcher.errors import ConfigError

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}


def pick_device(wanted: str = "auto") -> torch.device:
    """Return the device of this rank: `auto` is this rank's GPU where there is one, else the CPU.

    Args:
        wanted: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" on a machine where torch finds no GPU, or fewer GPUs than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device cuda was requested, but torch finds no GPU here", fix="use --device cpu")
    take_ranks()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if _bound_by_slurm(local_rank):
        local_rank = 0
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} visible on this machine",
            fix="start fewer ranks with --num_gpus, or check CUDA_VISIBLE_DEVICES",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _bound_by_slurm(local_rank: int) -> bool:
    """Return whether srun shows this rank only its own GPU (--gpus-per-task=1), which then has index 0."""
    by_srun = os.environ.get("SLURM_LOCALID") == str(local_rank) and "LAUNCHER_PID" not in os.environ
    return by_srun and torch.cuda.device_count() == 1


def init_distributed(
    device: torch.device | None = None,
    timeout: timedelta = timedelta(minutes=10),
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    port: int = PORT,
) -> None:
    """Initialize torch.distributed from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or from the variables
    of mpirun or srun; without any of them, with a world size of 1.

    Safe to call again. NCCL for CUDA tensors, gloo for CPU tensors.

    Args:
        init_method, rank, world_size: as in torch.distributed.init_process_group(). They take precedence over
            the environment, whose RANK and WORLD_SIZE are set accordingly.
        port: rendezvous port for ranks of mpirun and srun, if MASTER_PORT is not set.

    Raises:
        ConfigError: the port is taken; mpirun started ranks on several machines and MASTER_ADDR is not set;
            rank or world_size is given and the other is unknown, or they differ from those of an existing
            process group.
    """
    if dist.is_initialized():
        check_arguments(rank, world_size, (dist.get_rank(), dist.get_world_size()))
        return
    take_ranks(port=port)
    take_arguments(init_method, rank, world_size)
    device = device or pick_device()
    backend = BACKENDS[device.type]
    if device.type == "cuda":
        # Connect a group completely when it is created, not at the first use of a connection (`groups.py`).
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    if init_method is None and int(os.environ.get("WORLD_SIZE", 1)) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    device_id = device if device.type == "cuda" else None
    number, ranks = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))
    try:
        dist.init_process_group(
            backend, init_method, timeout, world_size=ranks, rank=number, device_id=device_id
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        place = init_method or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"the rendezvous address {place} is in use by another program",
            where="--master_port",
            fix="omit it, and a free port is chosen and reserved; or pass another "
            "(MASTER_PORT, if the ranks are not started by `launch`)",
        ) from None
