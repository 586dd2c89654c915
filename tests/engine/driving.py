"""An engine on a Stack, step by step, and everything it holds put together from all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher
from launcher.models.load import SafetensorsSource
from launcher.offload.offloaded import OffloadedSlice
from tests.pool import RankContext
from tests.pool.device import DEVICE
from tests.pool.logical import logical_parameters
from tests.zero.models import points, stack

ROWS = 8  # of the global batch
LR = 0.01
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}
STAGES = [0, 1, 2, 3]


def config_of(stage: int, accumulation: int = 1, **sections: Any) -> dict[str, Any]:
    """A JSON of 8 rows a step; `sections` are added to it, and take away what they give as None. No parameter is too
    small to be sharded, unless `zero_optimization` says so."""
    zero = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        **(sections.pop("zero_optimization", None) or {}),
    }
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "optimizer": ADAMW,
        "gradient_clipping": 0,
        "zero_optimization": zero,
        **sections,
    }
    return {key: value for key, value in config.items() if value is not None}


def engine_of(config: dict[str, Any], model: nn.Module | None = None, **arguments: Any) -> Any:
    """The engine alone of `launcher.initialize`; inputs become bf16 where the model does."""
    model = model or stack()
    if "bf16" in config:
        model.register_forward_pre_hook(lambda _, args: tuple(arg.bfloat16() for arg in args))
    return launcher.initialize(model=model, config=config, device=DEVICE, **arguments)[0]


def microbatches(ctx: RankContext, step: int, accumulation: int = 1) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of the points of a step."""
    x, y = points(step, ROWS)
    parts = ctx.world * accumulation
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))[ctx.rank :: ctx.world]


def advance(engine: Any, ctx: RankContext, steps: Iterable[int]) -> list[float]:
    """Train on the points of these steps; the losses are means over the global batch."""
    return [advance_one(engine, microbatches(ctx, s, engine.gradient_accumulation_steps())) for s in steps]


def advance_one(engine: Any, parts: list[tuple[Tensor, Tensor]]) -> float:
    """One optimizer step."""
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        loss = engine(*part)
        engine.backward(loss)
        total += loss.detach().double().cpu() / len(parts)
        engine.step()
    dist.all_reduce(total)
    return float(total) / engine.world_size


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Every parameter as the model computes with it."""
    return {name: value.detach().cpu().clone() for name, value in logical_parameters(engine.zero)}


def brought(value: Any) -> Any:
    """A state of the optimizer, in memory where it rests elsewhere."""
    return value.load() if isinstance(value, OffloadedSlice) else value


def whole_state(engine: Any) -> dict[str, Tensor]:
    """Master weights by name, and optimizer states by state/name, put together from all ranks' slices."""
    pieces = [(piece.name, piece, piece.data) for piece in engine.zero.slices()]
    for name, state in engine.optimizer.state_slices().items():
        pieces += [
            (f"{key}/{name}", engine.optimizer.slices[name], brought(value)) for key, value in state.items()
        ]
    mine = [(name, piece.shape, piece.start, piece.stop, data.cpu().clone()) for name, piece, data in pieces]
    every: list[Any] = [None] * engine.world_size
    dist.all_gather_object(every, mine)
    whole: dict[str, Tensor] = {}
    for name, shape, start, stop, data in [piece for rank in every for piece in rank]:
        if data.dim() == 0:
            whole[name] = data
        else:
            whole.setdefault(name, torch.full((shape.numel(),), torch.nan))[start:stop] = data
    return whole


def truth(
    optimizer: torch.optim.Optimizer, model: nn.Module, steps: Iterable[int], parts: int = 1
) -> list[float]:
    """Losses of plain PyTorch on the same points; `model` is changed in place."""
    model.to(DEVICE)
    losses = []
    for step in steps:
        x, y = points(step, ROWS)
        total = 0.0
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = model(*part) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The elements of every box that is read from safetensors inside."""
    read: list[int] = []
    real = SafetensorsSource.read_box

    def counting(
        source: SafetensorsSource, name: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        read.append(math.prod(sizes))
        return real(source, name, offsets, sizes)

    with patch.object(SafetensorsSource, "read_box", counting):
        yield read


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What launcher's logger says meanwhile, in this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("launcher").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("launcher").removeHandler(handler)
