"""16-bit pipeline training: the last stage scales the loss, and all stages unscale gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.pipeline.running import CLIP, LR, advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import batch, tiny_llama, train_plain

STEPS, MICROBATCHES = 4, 4
FP16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}


def train(
    ctx: RankContext, schedule: str, fp16: dict[str, Any]
) -> tuple[list[float], list[float], float, int]:
    """Return (losses, gradient norms, the final scale, skipped steps)."""
    pipeline = {"stages": ctx.world, "schedule": schedule}
    engine = engine_of(config_of(1, MICROBATCHES, pipeline, fp16=fp16), tiny_llama(layers=4))
    losses, norms = advance(engine, range(STEPS))
    return losses, norms, engine.loss_scaler.scale, engine.skipped_steps


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_losses_and_norms_are_those_of_one_process_in_fp32(pool: WorkerPool, schedule: str) -> None:
    """Neither contains the scale of 256."""
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    want = train_plain(tiny_llama(layers=4), batch, adamw, STEPS, MICROBATCHES, CLIP)
    for losses, norms, scale, skipped in pool.run(train, 2, schedule, FP16):
        assert losses == pytest.approx(want.losses, rel=5e-3)
        assert norms == pytest.approx(want.grad_norms, rel=2e-2)
        assert (scale, skipped) == (256, 0)


def test_an_overflow_halves_the_scale_of_all_stages(pool: WorkerPool) -> None:
    fp16 = FP16 | {"initial_scale_power": 26}
    (_, _, scale, skipped), other = pool.run(train, 2, "1f1b", fp16)
    assert skipped > 0 and scale == 2 ** (26 - skipped)
    assert other[2:] == (scale, skipped)
