"""Layers that run in several reentrant checkpoints of one backward, as those of an encoder of queries and passages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.driving import STAGES, config_of, engine_of
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.pool.device import DEVICE

SGD = {"type": "SGD", "params": {"lr": 0.05}}
STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class TwoSides(nn.Module):
    """Encodes two inputs with the same layers, each in checkpoints of its own.

    Args:
        blocks: number of blocks, each a unit under ZeRO-3; 0: plain layers of the root unit.
        mode: "reentrant", "plain", or "once" for one side only.
    """

    def __init__(self, blocks: int, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers: Any = nn.ModuleList(Block() for _ in range(blocks)) if blocks else nn.Linear(8, 8)
        self.mode = mode

    def side(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers if isinstance(self.layers, nn.ModuleList) else [self.layers]:
            x = layer(x) if self.mode == "plain" else checkpoint(layer, x, use_reentrant=True)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.side(x)
        second = 1.0 if self.mode == "once" else self.side(y)
        return (first * second).sum() + (first - 1).square().sum()


def losses(ctx: RankContext, stage: int, blocks: int, mode: str) -> list[float]:
    engine = engine_of(config_of(stage, optimizer=SGD), TwoSides(blocks, mode))
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + ctx.rank)
        loss = engine(torch.randn(4, 8, device=DEVICE), torch.randn(4, 8, device=DEVICE))
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("blocks", [0, 2])
def test_gradients_are_those_without_checkpoints(pool: WorkerPool, stage: int, blocks: int) -> None:
    """At stages 2 and 3 blocks are reduced after the first part: the second one is an error, not lost."""
    wanted = pool.run(losses, 2, stage, blocks, "plain")
    if blocks and stage >= 2:
        with pytest.raises(RanksFailed, match="arrives in several parts"):
            pool.run(losses, 2, stage, blocks, "reentrant")
        assert pool.run(losses, 2, stage, blocks, "once")[0]
    else:
        for rank, found in zip(wanted, pool.run(losses, 2, stage, blocks, "reentrant"), strict=True):
            assert found == pytest.approx(rank, rel=1e-6)
