"""Tiles of a sequence give the values and gradients of the full function, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import ArgumentsError
from launcher.integrations.stand_ins import initialize
from launcher.integrations.tiled_compute import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from tests.engine.driving import config_of
from tests.pool import RankContext, WorkerPool

HIDDEN, VOCABULARY, LENGTH = 6, 5, 7


class Mlp(nn.Module):
    """Records the number of rows in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.rows: list[int] = []

    def inner(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[-2])
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return TiledMLP.apply(Mlp.inner, self, x, 3, [self.up.weight])


def together(self: nn.Module, x: Tensor) -> Tensor:
    return Mlp.inner(self, x)  # type: ignore[arg-type]


def by_keywords(self: Mlp, x: Tensor) -> Tensor:
    return sequence_tiled_compute(Mlp.inner, LENGTH, 3, {"x": x}, {"self": self}, "x", output_reduction=None)


def by_lists(self: Mlp, x: Tensor) -> Tensor:
    return SequenceTiledCompute.apply(Mlp.inner, LENGTH, 3, ["x"], ["self"], "x", None, 1, None, x, self)


def gradients(model: nn.Module, run: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, HIDDEN, requires_grad=True)
    run(model, x).square().sum().backward()
    assert x.grad is not None
    return [
        x.grad,
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("tiled", [Mlp.forward, by_keywords, by_lists])
def test_an_mlp_in_tiles_is_the_mlp(tiled: Any) -> None:
    torch.manual_seed(0)
    model = Mlp()
    want = gradients(model, together)
    model.rows.clear()
    got = gradients(model, tiled)
    assert model.rows == [3, 3, 1, 1, 3, 3]  # forward, and again from the last tile on
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def loss_of(head: nn.Module, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    losses = nn.functional.cross_entropy(head(x), y, reduction="none")
    return losses.sum() if mask is None else (losses * mask).sum()


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_in_tiles_is_the_loss(masked: bool) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(HIDDEN, VOCABULARY), torch.randn(2, LENGTH, HIDDEN)
    y, mask = torch.randint(VOCABULARY, (2, LENGTH)), torch.rand(2, LENGTH) if masked else None
    flat = None if mask is None else mask.flatten()
    want = loss_of(head, x.flatten(0, 1), y.flatten(), flat)
    want.backward()
    assert head.weight.grad is not None
    expected = head.weight.grad.clone()
    head.zero_grad()
    got = TiledFusedLogitsLoss.apply(loss_of, head, x, y, mask, 4, None, "sum")
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(head.weight.grad, expected)
    mean = TiledFusedLogitsLoss.apply(loss_of, head, x, y, mask, 4, None, "mean")
    torch.testing.assert_close(mean, want / 4)


def test_what_cannot_be_is_an_error() -> None:
    x, y = torch.ones(2, 3, 4), torch.ones(2, 3)
    with pytest.raises(ArgumentsError, match="median"):
        TiledFusedLogitsLoss.apply(loss_of, None, x, y, None, 2, None, "median")
    with pytest.raises(ArgumentsError, match="same batch and sequence"):
        TiledFusedLogitsLoss.apply(loss_of, None, x, y[:, 1:], None, 2, None, "sum")


def trained(ctx: RankContext, stage: int, tiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp())
    for mlp in () if tiled else model:
        mlp.forward = mlp.inner  # type: ignore[assignment]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = initialize(model=model, config=config_of(stage, zero_optimization=zero))[0]
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + ctx.rank)
        loss = engine(torch.randn(2, LENGTH, HIDDEN)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_trains_tiles(pool: WorkerPool, stage: int) -> None:
    for got, want in zip(pool.run(trained, 2, stage, True), pool.run(trained, 2, stage, False), strict=True):
        assert got == pytest.approx(want, rel=1e-5)
