"""Gradient keys at every stage: sum or mean, with or without a norm, unused parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.config import load
from launcher.errors import ConfigError, LauncherError
from tests.engine.driving import STAGES, advance, config_of, engine_of, truth, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

SGD = {"type": "SGD", "params": {"lr": 0.02}}


def run(ctx: RankContext, stage: int, sections: dict[str, Any]) -> tuple[list[float], Any, Any]:
    engine = engine_of(config_of(stage, 2, optimizer=SGD, **sections))
    losses = advance(engine, ctx, range(4))
    return losses, engine.get_global_grad_norm(), whole_weights(engine)


@pytest.mark.key("gradient_allreduce_op")
@pytest.mark.parametrize("stage", STAGES)
def test_sum_is_as_many_times_the_mean_as_there_are_ranks(pool: WorkerPool, stage: int) -> None:
    """SGD with a sum over 2 ranks equals SGD with twice the learning rate and a mean."""
    model = stack()
    want = truth(torch.optim.SGD(model.parameters(), lr=2 * 0.02), model, range(4), parts=4)
    losses, norm, weights = pool.run(run, 2, stage, {"gradient_allreduce_op": "SUM"})[0]
    assert losses == pytest.approx(want, rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), rtol=1e-5, atol=1e-6)
    mean = pool.run(run, 2, stage, {})[0]
    assert mean[0] != losses
    first = pool.run(first_norm, 2, stage, "sum")[0], pool.run(first_norm, 2, stage, "mean")[0]
    assert first[0] == pytest.approx(2 * first[1], rel=1e-6)
    assert norm is not None


def first_norm(ctx: RankContext, stage: int, op: str) -> float:
    engine = engine_of(config_of(stage, gradient_allreduce_op=op))
    advance(engine, ctx, [0])
    return float(engine.get_global_grad_norm())


@pytest.mark.key("zero_optimization.compute_grad_norm")
@pytest.mark.parametrize("stage", STAGES)
def test_no_norm(pool: WorkerPool, stage: int) -> None:
    """Results are equal without it, and there is no norm."""
    plain = pool.run(run, 2, stage, {})[0]
    without = pool.run(run, 2, stage, {"zero_optimization": {"stage": stage, "compute_grad_norm": False}})[0]
    assert without[0] == plain[0]
    assert without[1] is None and plain[1] > 0


@pytest.mark.key("zero_optimization.compute_grad_norm")
@pytest.mark.parametrize(
    "user",
    [
        {"gradient_clipping": 0.5},
        {},
        {"gradient_clipping": 0, "fp16": {"enabled": True}},
        {"gradient_clipping": 0, "bf16": {"enabled": True, "check_grad_overflow": True}},
    ],
)
def test_what_needs_the_norm_is_refused_without(user: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"compute_grad_norm is false, but .* needs the norm"):
        load({"zero_optimization": {"compute_grad_norm": False}, **user})


def unused(ctx: RankContext, stage: int, ignore: bool) -> str:
    zero = {"stage": stage, "ignore_unused_parameters": ignore}
    engine = engine_of(config_of(stage, zero_optimization=zero), stack(spare=True))
    try:
        advance(engine, ctx, range(2))
    except LauncherError as error:
        return str(error)
    return ""


@pytest.mark.key("zero_optimization.ignore_unused_parameters")
@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_are_ignored_or_an_error(pool: WorkerPool, stage: int) -> None:
    assert pool.run(unused, 2, stage, True) == ["", ""]
    for said in pool.run(unused, 2, stage, False):
        assert "6 parameters got no gradient in this step: blocks.0.spare.weight" in said
