"""`activation_checkpointing` in an engine: every key, every stage, any model, with the results of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.driving import advance, config_of, engine_of, truth, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

STEPS = range(4)
EVERYTHING = {
    "partition_activations": True,
    "number_checkpoints": 2,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


def run(ctx: RankContext, stage: int, keys: dict[str, Any] | None) -> tuple[list[float], Any, int]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    engine = engine_of(config_of(stage, 2, zero_optimization=zero, activation_checkpointing=keys), stack())
    losses = advance(engine, ctx, STEPS)
    checkpointer = engine.checkpointer
    return losses, whole_weights(engine), 0 if checkpointer is None else len(checkpointer.names)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_model_at_any_stage(pool: WorkerPool, stage: int) -> None:
    """Bit-identical to the engine without the section, and close to one process."""
    import torch

    plain = pool.run(run, 2, stage, None)[0]
    losses, weights, checkpointed = pool.run(run, 2, stage, EVERYTHING)[0]
    assert checkpointed == 2
    assert losses == plain[0]
    assert all(torch.equal(weights[name], value) for name, value in plain[1].items())
    model = stack()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    assert losses == pytest.approx(truth(adamw, model, STEPS, 4), rel=1e-5)


def printed(ctx: RankContext, every: int | None) -> int:
    import contextlib
    import gc
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        keys = {"profile": True}
        engine = engine_of(config_of(3, steps_per_print=every, activation_checkpointing=keys), stack())
        advance(engine, ctx, STEPS)
        del engine
        gc.collect()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("activation_checkpointing")]
    assert all("blocks.1 recompute" in line for line in lines), json.dumps(lines)
    return len(lines)


@pytest.mark.key("activation_checkpointing.profile")
def test_rank_0_prints_the_profile(pool: WorkerPool) -> None:
    """Printed every `steps_per_print` steps, or once at the end."""
    assert pool.run(printed, 2, 2) == [2, 0]
    assert pool.run(printed, 2, None) == [1, 0]
