"""Expert layers that a script builds, run by both engines, and their gates alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, WIDTH, CLASSES, ROWS, TOKENS = 4, 16, 5, 3, 8
LAYERS: list[dict[str, Any]] = [
    {"ep_size": 1, "k": 1, "stage": 1},
    {"ep_size": 2, "k": 1, "stage": 2, "noisy_gate_policy": "RSample"},
    {"ep_size": 2, "k": 1, "stage": 0, "noisy_gate_policy": "Jitter", "use_residual": True},
    {"ep_size": 2, "k": 2, "stage": 1},
    {"ep_size": 2, "k": 2, "stage": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False},
    {"ep_size": 2, "k": 3, "stage": 1, "capacity_factor": 0.5},
]
GATES: list[tuple[str, dict[str, Any]]] = [
    ("top1gating", {"capacity_factor": 1.0, "min_capacity": 0}),
    ("top1gating", {"capacity_factor": 0.5, "min_capacity": 2, "use_rts": False}),
    ("top1gating", {"capacity_factor": 1.0, "min_capacity": 0, "noisy_gate_policy": "RSample"}),
    ("top1gating", {"capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": False}),
    ("top2gating", {"capacity_factor": 1.0, "min_capacity": 0}),
    ("top2gating", {"capacity_factor": 0.6, "min_capacity": 1, "top2_2nd_expert_sampling": False}),
    ("top2gating", {"capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": False}),
    ("topkgating", {"k": 3, "capacity_factor": 0.7, "min_capacity": 0}),
    ("topkgating", {"k": 3, "capacity_factor": 0.7, "min_capacity": 0, "drop_policy": "position"}),
    ("topkgating", {"k": 2, "capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": False}),
]


def gated(sharded_moe: Any) -> list[dict[str, Any]]:
    """Return the result of each of `GATES`, dense and sparse, from a module with DeepSpeed's names."""
    told = []
    for seed, (name, arguments) in enumerate(GATES):
        for sparse in (False, True):
            torch.manual_seed(seed)
            logits = torch.randn(12, 4)
            found = getattr(sharded_moe, name)(logits, **arguments, sparse_routes=sparse)
            told.append([part.tolist() if isinstance(part, Tensor) else part for part in found])
    return told


class Classifier(nn.Module):
    """Two expert layers between dense layers.

    Args:
        moe: `deepspeed.moe.layer.MoE`, of either side.
        arguments: arguments of the layer.
        balance: weight of the load-balancing loss; it depends on the assignment of rows to ranks.
    """

    def __init__(self, moe: Any, arguments: dict[str, Any], balance: float = 0.1, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.balance = balance
        self.first = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.layers = nn.ModuleList(
            moe(WIDTH, expert, count, min_capacity=0, **arguments) for count in (4, 8)
        )
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        x, balance = self.first(x), 0.0
        for layer in self.layers:
            made, loss, _ = layer(x)
            x, balance = x + made, balance + loss
        return F.cross_entropy(self.last(x.mean(1)).float(), wanted) + self.balance * balance


def train(initialize: Any, moe: Any) -> list[list[float]]:
    """Return the mean losses of each of `LAYERS`, one per step."""
    losses = []
    for layer in LAYERS:
        arguments = {key: value for key, value in layer.items() if key != "stage"}
        model = Classifier(moe, arguments)
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": layer["stage"]},
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000,
        }
        engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
        losses.append([_step(engine, step) for step in range(STEPS)])
        engine.destroy()
    return losses


def _step(engine: Any, step: int) -> float:
    torch.manual_seed(100 * step + dist.get_rank())
    x, wanted = torch.randn(ROWS, TOKENS, WIDTH), torch.randint(CLASSES, (ROWS,))
    loss = engine(x, wanted)
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
