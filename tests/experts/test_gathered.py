"""Replicated experts at ZeRO 3: ranks use different ones, and no rank waits for another's gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.running import plain_steps, whole_state

WIDTH, EXPERTS, STEPS, LR = 8, 4, 3, 0.1


class Block(nn.Module):
    """Experts as separate modules, as in models outside of transformers; those without tokens are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, expert: int) -> Tensor:
        made: Tensor = self.experts[expert](self.norm(x))
        return x + made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, (expert + number) % EXPERTS)
        return x.square().mean()


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(ctx: RankContext) -> tuple[list[float], dict[str, Tensor]]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine: Any = launcher.initialize(model=Model(), config=config, device=DEVICE)[0]
    losses = []
    for step in range(STEPS):
        loss = engine(rows(step, ctx.rank), ctx.rank)
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / ctx.world)
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_use_different_experts(pool: WorkerPool, world: int) -> None:
    model = Model().double()
    wanted = plain_steps(
        model,
        lambda step: sum(model(rows(step, rank).double(), rank) for rank in range(world)) / world,
        STEPS,
        LR,
    )
    for losses, weights in pool.run(trained, world):
        assert losses == pytest.approx(wanted[0], rel=1e-6)
        for name, value in wanted[2].items():
            assert (weights[name].double() - value).norm() <= 1e-6 * value.norm(), name
