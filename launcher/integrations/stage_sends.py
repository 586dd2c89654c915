"""`deepspeed.runtime.pipe.p2p`: tensors between stages, for scripts that send some of their own.

The engine's stages send by `launcher.pipeline`; these are torch.distributed's sends, with stages in the place of ranks.
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
    """Name the grid whose stages are meant."""
    global _grid
    _grid = grid


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send to the rank of another stage that has this one's other coordinates.

    Raises:
        LauncherError: init_process_groups() was not called, or the send is to go on by itself.
    """
    return dist.send(tensor, _rank_of(dest_stage, async_op))


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive into a tensor; as `send`."""
    return dist.recv(tensor, _rank_of(src_stage, async_op))


def _rank_of(stage: int, async_op: bool) -> int:
    if _grid is None:
        raise LauncherError(
            "there is no grid that maps stages to ranks",
            where="deepspeed.runtime.pipe.p2p",
            fix="call p2p.init_process_groups(grid) with a PipelineParallelGrid first",
        )
    if async_op:
        raise LauncherError(
            "async_op=True is not available, and DeepSpeed refuses it, too",
            where="deepspeed.runtime.pipe.p2p",
            fix="use torch.distributed.isend() and irecv()",
        )
    return _grid.stage_to_global(stage)
