"""Engines whose layers are split over tp, and what they hold put together from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher
from launcher.comm import all_reduce
from launcher.zero import ParamSlice
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share

LR, CLIP = 0.01, 0.5


def config_of(stage: int, lr: float = LR, **sections: Any) -> dict[str, Any]:
    """A JSON of 8 sequences a step."""
    return {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.1}},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def engine_of(
    tp: int, config: dict[str, Any], model: nn.Module, *, sequence: bool = False, **arguments: Any
) -> Any:
    """The engine alone of `launcher.initialize`, at a degree."""
    config = {**config, "tensor_parallel": {"autotp_size": tp, "sequence_parallel": sequence}}
    return launcher.initialize(model=model, config=config, device=DEVICE, **arguments)[0]


def advance(engine: Any, steps: Iterable[int]) -> tuple[list[float], list[float]]:
    """(losses over the global batch, gradient norms) of optimizer steps."""
    losses, norms, dp = [], [], engine.mesh.dp
    for step in steps:
        total = torch.zeros((), dtype=torch.float64)
        parts = share(batch(step), dp.rank, dp.degree, engine.gradient_accumulation_steps())
        for ids in parts:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            total += loss.detach().double().cpu() / len(parts)
            engine.step()
        all_reduce(total, dp, "test").wait()
        losses.append(float(total) / dp.degree)
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def plain_steps(
    model: nn.Module, loss_of: Callable[[int], Tensor], steps: int, lr: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, gradient norms, weights) of steps of SGD in plain PyTorch, on one process."""
    model.to(DEVICE)
    sgd = torch.optim.SGD(model.parameters(), lr)
    losses, norms = [], []
    for step in range(steps):
        sgd.zero_grad()
        loss = loss_of(step)
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
        sgd.step()
    return losses, norms, {name: p.detach().cpu() for name, p in model.named_parameters()}


def whole_state(engine: Any) -> dict[str, Tensor]:
    """Logical master weights by name and optimizer states by state/name, from all ranks' slices."""
    pieces: list[tuple[str, ParamSlice, Tensor]] = [(p.name, p, p.data) for p in engine.zero.slices()]
    for name, state in engine.optimizer.state_slices().items():
        pieces += [(f"{key}/{name}", engine.optimizer.slices[name], value) for key, value in state.items()]
    every: list[Any] = [None] * engine.world_size
    mine = [(name, p.split, p.start, p.stop, data.cpu().clone()) for name, p, data in pieces]
    dist.all_gather_object(every, mine)
    whole: dict[str, Tensor] = {}
    for name, split, start, stop, data in [piece for rank in every for piece in rank]:
        if data.dim() == 0:
            whole[name] = data
            continue
        logical = whole.setdefault(name, torch.full(split.shape, torch.nan))
        for box in split.boxes(start, stop):
            place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            logical[place] = split.view(data, start, box)
    return whole
