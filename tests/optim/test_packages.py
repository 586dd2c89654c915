"""Optimizers of other packages (bitsandbytes, mup): created by the package if it is installed, otherwise refused."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import ConfigError
from tests.engine.driving import advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

EIGHT_BIT = ["Adam8bit", "AdamW8bit", "PagedAdamW8bit", "Lion8bit"]
MUP = ["MuAdam", "MuAdamW", "MuSGD"]


class Recording(torch.optim.SGD):
    """A stand-in for a class of bitsandbytes: records its keywords."""

    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, lr=keywords["lr"])
        self.keywords = keywords


def without(ctx: RankContext, kind: str) -> str:
    sys.modules["bitsandbytes"] = sys.modules["mup"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(ConfigError) as caught:
            engine_of(config_of(3, optimizer={"type": kind}))
        return str(caught.value)
    finally:
        del sys.modules["bitsandbytes"], sys.modules["mup"]


@pytest.mark.key("optimizer.type")
@pytest.mark.parametrize("kind", [*EIGHT_BIT, *MUP])
def test_without_the_package(pool: WorkerPool, kind: str) -> None:
    (said,) = pool.run(without, 1, kind)
    package = "bitsandbytes" if kind in EIGHT_BIT else "mup"
    assert f"{kind} requires the package {package}" in said and f"pip install {package}" in said
    assert "optimizer.type" in said


def with_bitsandbytes(ctx: RankContext, kind: str, stage: int) -> tuple[str, dict[str, Any], list[float]]:
    package = ModuleType("bitsandbytes")
    package.optim = ModuleType("bitsandbytes.optim")  # type: ignore[attr-defined]
    cls = type(kind, (Recording,), {})
    setattr(package.optim, kind, cls)
    sys.modules["bitsandbytes"] = package
    try:
        params = {"lr": 0.05, "betas": [0.8, 0.9], "min_8bit_size": 1024}
        engine = engine_of(config_of(stage, optimizer={"type": kind, "params": params}))
        return engine.get_type()[0], engine.optimizer.inner.keywords, advance(engine, ctx, range(3))
    finally:
        del sys.modules["bitsandbytes"]


@pytest.mark.key("optimizer.type", "optimizer.params.min_8bit_size")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_bitsandbytes(pool: WorkerPool, kind: str, stage: int) -> None:
    for name, keywords, losses in pool.run(with_bitsandbytes, 2, kind, stage):
        assert name == kind
        assert keywords == {"lr": 0.05, "betas": (0.8, 0.9), "min_8bit_size": 1024}
        assert losses[-1] < losses[0]


def by_width(params: Any, impl: Any = torch.optim.Adam, **keywords: Any) -> torch.optim.Optimizer:
    """A stand-in for mup: a matrix's learning rate falls with its width, which it reads from the full parameter."""
    groups = [
        {"params": [p], "lr": keywords["lr"] / (p.shape[1] if p.dim() > 1 else 1)}
        for p in params
        if isinstance(p, nn.Parameter)
    ]
    return impl(groups, **keywords)  # type: ignore[no-any-return]


def with_mup(ctx: RankContext, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    package = ModuleType("mup")
    package.MuAdamW = lambda params, **k: by_width(params, impl=torch.optim.AdamW, **k)  # type: ignore[attr-defined]
    sys.modules["mup"] = package
    try:
        params = {"lr": 0.02, "weight_decay": 0.1}
        engine = engine_of(config_of(stage, optimizer={"type": "muadamw", "params": params}))
        return engine.get_lr(), (advance(engine, ctx, range(3)), whole_weights(engine))[1]
    finally:
        del sys.modules["mup"]


@pytest.mark.key("optimizer.type")
@pytest.mark.parametrize("stage", [0, 3])
def test_mup_sees_whole_parameters(pool: WorkerPool, stage: int) -> None:
    rates, weights = pool.run(with_mup, 2, stage)[0]
    shapes = [p.shape for p in stack().parameters()]
    assert rates == [0.02 / (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    assert not torch.equal(weights["last.weight"], stack().last.weight)
