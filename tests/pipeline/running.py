"""Engines whose model is cut into stages, and what they hold put together from all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import launcher
from tests.pool.device import DEVICE
from tests.pool.logical import logical_parameters
from tests.pool.reference import batch, share

LR, CLIP = 0.01, 0.5
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}


def config_of(stage: int, microbatches: int, pipeline: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A JSON of 8 sequences a step."""
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": microbatches,
        "optimizer": ADAMW,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "pipeline": pipeline,
        **sections,
    }


def engine_of(config: dict[str, Any], model: nn.Module, **arguments: Any) -> Any:
    return launcher.initialize(model=model, config=config, device=DEVICE, **arguments)[0]


def advance(engine: Any, steps: Iterable[int]) -> tuple[list[float], list[float]]:
    """(losses over the global batch, gradient norms) of optimizer steps."""
    losses, norms, dp = [], [], engine.mesh.dp
    for step in steps:
        parts = share(batch(step), dp.rank, dp.degree, engine.gradient_accumulation_steps())
        data = iter([{"input_ids": ids, "labels": ids} for ids in parts]) if engine.is_first_stage() else None
        losses.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Logical weights by name, of all stages."""
    mine = {name: value.float().cpu().clone() for name, value in logical_parameters(engine.zero)}
    every: list[Any] = [None] * engine.world_size
    dist.all_gather_object(every, mine)
    return {name: value for weights in every for name, value in weights.items()}
