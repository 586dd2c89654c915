"""The default process group and the device of this rank, from the environment."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.errors import ConfigError

BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}


def pick_device(wanted: str = "auto") -> torch.device:
    """The device of this rank: `auto` is this rank's GPU where there is one, else the CPU.

    Args:
        wanted: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" on a machine where torch finds no GPU, or fewer GPUs than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch finds no GPU here", fix="use --device cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine shows {torch.cuda.device_count()}",
            fix="start fewer ranks with --num_gpus, or check CUDA_VISIBLE_DEVICES",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_distributed(device: torch.device | None = None, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Start torch.distributed from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them, a world of one.

    Safe to call again. NCCL for CUDA tensors, gloo for CPU tensors.

    Raises:
        ConfigError: the port is taken.
    """
    if dist.is_initialized():
        return
    device = device or pick_device()
    backend = BACKENDS[device.type]
    device_id = device if device.type == "cuda" else None
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        try:
            dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConfigError(
                f"another program listens at {place}, where the ranks wanted to meet",
                where="--master_port",
                fix="leave it out, and a free port is picked and held; or name another",
            ) from None
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
