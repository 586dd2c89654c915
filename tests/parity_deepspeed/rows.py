"""A sequence of layers and its data, run in two pipeline stages by both engines."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pool.reference import VOCAB, batch

STEPS, WIDTH, PARTS = 6, 16, 4


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, states: Tensor) -> Tensor:
        return states + torch.tanh(self.linear(self.norm(states)))


def logits(embedding: Any, states: Tensor) -> Tensor:
    scores: Tensor = states @ embedding.weight.T
    return scores


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def module_of(pipe: Any, *, tied: bool) -> Any:
    """Return a PipelineModule of two stages; `pipe` has the names of deepspeed.pipe."""
    ends = [pipe.LayerSpec(nn.Embedding, VOCAB, WIDTH), pipe.LayerSpec(nn.Linear, WIDTH, VOCAB)]
    if tied:
        first = pipe.TiedLayerSpec("word", nn.Embedding, VOCAB, WIDTH)
        ends = [first, pipe.TiedLayerSpec("word", nn.Embedding, VOCAB, WIDTH, forward_fn=logits)]
    layers = [ends[0], *(pipe.LayerSpec(Mix, WIDTH) for _ in range(4)), ends[1]]
    return pipe.PipelineModule(
        layers, num_stages=2, loss_fn=loss_of, seed_layers=True, partition_method="uniform"
    )


def config_of(stage: int, *, tied: bool) -> dict[str, Any]:
    """Return the JSON, without clipping for tied layers at stage 0, where DeepSpeed computes a different norm."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": 0.0 if tied and stage == 0 else 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1_000_000,
    }


def train(engine: Any) -> list[float]:
    """Return the mean losses, one per step, and the loss on held-out data at the end."""
    losses = [float(engine.train_batch(_data(step))) for step in range(STEPS)]
    return [*losses, float(engine.eval_batch(_data(STEPS)))]


def _data(step: int) -> Any:
    return iter([(ids, ids) for ids in batch(step, 2 * PARTS).chunk(PARTS)])
