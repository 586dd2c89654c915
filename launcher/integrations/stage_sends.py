"""`deepspeed.runtime.pipe.p2p`: stage p2p for scripts that send tensors of their own.

The engine's stages communicate through `launcher.pipeline`. These functions are torch.distributed's send and
recv, addressed by stage instead of rank.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from launcher.errors import LauncherError
from launcher.pipeline.sequential.grid import PipelineParallelGrid

_grid: PipelineParallelGrid | None = None


def can_send_recv() -> bool:
    return True


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """Set the grid that maps stages to ranks."""
    global _grid
    _grid = grid


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send to the rank of another stage that has the same coordinates on the other axes.

    Raises:
        LauncherError: init_process_groups() was not called, or `async_op` is true.
    """
    return dist.send(tensor, _rank_of(dest_stage, async_op))


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive into a tensor from another stage; see `send`."""
    return dist.recv(tensor, _rank_of(src_stage, async_op))


def _rank_of(stage: int, async_op: bool) -> int:
    if _grid is None:
        raise LauncherError(
            "no grid maps stages to ranks yet",
            where="deepspeed.runtime.pipe.p2p",
            fix="call p2p.init_process_groups(grid) with a PipelineParallelGrid first",
        )
    if async_op:
        raise LauncherError(
            "async_op=True is not supported, nor is it in DeepSpeed",
            where="deepspeed.runtime.pipe.p2p",
            fix="use torch.distributed.isend() and irecv()",
        )
    return _grid.stage_to_global(stage)
