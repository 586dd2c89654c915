"""Lion, Lamb, Muon and Adam without bias correction match plain single-process PyTorch at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.engine.driving import STAGES, advance, config_of, engine_of, truth, whole_weights
from tests.optim.references import Plain, Two, lamb, lion
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

STEPS = range(10)
Left = tuple[list[float], dict[str, Tensor]]
Make = Callable[[nn.Module], Optimizer]


def assert_like(got: Left, want: Left) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    for name, value in want[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def plain(make: Make) -> Left:
    model = stack()
    losses = truth(make(model), model, STEPS)
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


def each(update: Callable[..., None], **options: Any) -> Make:
    return lambda model: Plain(model.parameters(), update, **options)


def two(matrices: dict[str, Any], rest: dict[str, Any]) -> Make:
    return lambda model: Two(model, matrices=matrices, rest=rest)


def uncorrected(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    m, v = (state.setdefault(key, torch.zeros_like(p)) for key in "mv")
    decay = group["weight_decay"]
    g = g if group["decoupled"] else g + decay * p
    m.copy_(0.9 * m + 0.1 * g)
    v.copy_(0.999 * v + 0.001 * g * g)
    p.sub_(group["lr"] * (m / (v.sqrt() + 1e-8) + (decay * p if group["decoupled"] else 0.0)))


LAMB = {
    "lr": 0.02,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_coeff": 10,
    "min_coeff": 0.01,
}
REST = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
MATRICES = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
# name -> (type, params, the same in plain PyTorch)
RUNS: dict[str, tuple[str, dict[str, Any], Make]] = {
    "lion": (
        "lion",
        {"lr": 0.003, "betas": [0.9, 0.99], "weight_decay": 0.1},
        each(lion, lr=0.003, betas=(0.9, 0.99), weight_decay=0.1),
    ),
    "lion's defaults": ("Lion", {}, each(lion, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)),
    "lamb": ("Lamb", {"lr": 0.02, "weight_decay": 0.1}, each(lamb, **LAMB)),
    "lamb, bounded": (
        "Lamb",
        {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 0.4, "min_coeff": 0.3},
        each(lamb, **{**LAMB, "max_coeff": 0.4, "min_coeff": 0.3}),
    ),
    "lamb, eps inside": (
        "Lamb",
        {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3, "eps_inside_sqrt": True},
        each(lamb, **{**LAMB, "eps": 1e-3, "eps_inside_sqrt": True}),
    ),
    "lamb, uncorrected": (
        "Lamb",
        {"lr": 0.02, "weight_decay": 0.1, "bias_correction": False},
        each(lamb, **LAMB, bias_correction=False),
    ),
    "muon": ("Muon", {"lr": 0.02, "adam_lr": 0.01}, two(MATRICES, REST)),
    "muon, standard": (
        "muon",
        {"lr": 0.01, "muon_lr": 0.03, "momentum": 0.8, "weight_decay": 0.1, "ns_method": "standard"},
        two({"lr": 0.03, "momentum": 0.8, "weight_decay": 0.1}, {**REST, "weight_decay": 0.1}),
    ),
    "adam, uncorrected": (
        "Adam",
        {"lr": 0.003, "weight_decay": 0.1, "bias_correction": False, "adam_w_mode": False},
        each(uncorrected, lr=0.003, weight_decay=0.1, decoupled=False),
    ),
    "adamw, uncorrected": (
        "AdamW",
        {"lr": 0.003, "weight_decay": 0.1, "bias_correction": False},
        each(uncorrected, lr=0.003, weight_decay=0.1, decoupled=True),
    ),
}


def trained(ctx: RankContext, stage: int, kind: str, params: dict[str, Any], zero: dict[str, Any]) -> Left:
    config = config_of(stage, optimizer={"type": kind, "params": params})
    config["zero_optimization"].update(zero)
    engine = engine_of(config)
    return advance(engine, ctx, STEPS), whole_weights(engine)


@pytest.mark.pairwise
@pytest.mark.key(
    "optimizer.params.bias_correction", "optimizer.params.max_coeff", "optimizer.params.min_coeff",
    "optimizer.params.eps_inside_sqrt", "optimizer.params.momentum", "optimizer.params.ns_method",
    "optimizer.params.muon_lr", "optimizer.params.adam_lr", "optimizer.params.weight_decay",
    "optimizer.params.betas", "optimizer.params.eps", "optimizer.type",
)  # fmt: skip
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", RUNS)
def test_as_plain_pytorch(pool: WorkerPool, stage: int, name: str) -> None:
    kind, params, make = RUNS[name]
    assert_like(pool.run(trained, 2, stage, kind, params, {})[0], plain(make))


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_in_sub_groups_on_four_ranks(pool: WorkerPool, stage: int, name: str) -> None:
    """Several collectives instead of one give the same results; slices cross ranks in other places."""
    kind, params, make = RUNS[name]
    left = pool.run(trained, 4, stage, kind, params, {"sub_group_size": 200})
    assert_like(left[0], plain(make))
