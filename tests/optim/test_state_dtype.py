"""Moments in the dtype of bfloat16 master weights, for every optimizer that has moments."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.driving import advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool

LOW = {"enabled": True, "bf16_master_weights_and_grads": True}


def run(
    ctx: RankContext, stage: int, kind: str, params: dict[str, Any], bf16: Any
) -> tuple[int, list[float]]:
    """Return the bytes of the optimizer's state, and losses."""
    config = config_of(stage, optimizer={"type": kind, "params": {"lr": 0.01, **params}}, bf16=bf16)
    engine = engine_of(config)
    losses = advance(engine, ctx, [0, 0, 0, 0])
    return engine.held_bytes()["optimizer"], losses


@pytest.mark.key("optimizer.params.fp32_optimizer_states")
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "Lion", "Muon"])
def test_moments_take_half_the_bytes(pool: WorkerPool, stage: int, kind: str) -> None:
    wide, losses = pool.run(run, 2, stage, kind, {"fp32_optimizer_states": True}, LOW)[0]
    narrow, others = pool.run(run, 2, stage, kind, {"fp32_optimizer_states": False}, LOW)[0]
    assert narrow == wide / 2
    assert losses[-1] < losses[0] and others == pytest.approx(losses, rel=0.1)
    full, _ = pool.run(run, 2, stage, kind, {"fp32_optimizer_states": False}, {"enabled": True})[0]
    assert full == wide  # master weights are float32, and so are their moments


@pytest.mark.parametrize("stage", [0, 3])
def test_lamb_steps_bfloat16_master_weights(pool: WorkerPool, stage: int) -> None:
    low, wide = (pool.run(run, 2, stage, "Lamb", {}, bf16)[0][1] for bf16 in (LOW, {"enabled": True}))
    assert low[-1] < low[0] and low == pytest.approx(wide, rel=0.1)
