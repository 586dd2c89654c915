"""fp16: a gradient overflow on one rank skips the step on all of them, and adjusts the loss scale."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.optim.loss_scale import LossScaleExhausted
from tests.engine.driving import STAGES, advance_one, config_of, engine_of, microbatches, whole_state
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.001, "warmup_num_steps": 10, "warmup_type": "linear"},
}
CAST = {"enabled": True, "auto_cast": True}
GOOD, BAD = True, False


def fp16(**keys: Any) -> dict[str, Any]:
    return {"fp16": {**CAST, "initial_scale_power": 8, "loss_scale_window": 2, **keys}}


def step(engine: Any, ctx: RankContext, number: int, good: bool) -> None:
    """Take a step; if it is not good, one input of the last rank is infinite."""
    parts = microbatches(ctx, number, engine.gradient_accumulation_steps())
    if not good and ctx.rank == ctx.world - 1:
        parts[0][0][0, 0] = torch.inf
    advance_one(engine, parts)


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def skip_one(ctx: RankContext, stage: int, accumulation: int, sections: dict[str, Any]) -> None:
    engine = engine_of(config_of(stage, accumulation, scheduler=WARMUP, **sections))
    for number in range(3):
        step(engine, ctx, number, GOOD)
    before, rates = whole_state(engine), engine.get_lr()
    step(engine, ctx, 3, BAD)
    assert same(whole_state(engine), before)
    assert not engine.was_step_applied() and engine.get_global_grad_norm() == torch.inf
    assert (engine.skipped_steps, engine.global_steps) == (1, 4)
    assert engine.get_lr() == rates and engine.lr_scheduler.last_batch_iteration == 2
    step(engine, ctx, 4, GOOD)  # nothing of the infinity is left
    after = whole_state(engine)
    assert engine.was_step_applied() and engine.skipped_steps == 1
    assert engine.get_lr() > rates
    assert not same(after, before)
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "sections",
    [fp16(), fp16(loss_scale=64), {"bf16": {"enabled": True}}],
    ids=["dynamic", "static", "bf16"],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    pool: WorkerPool, stage: int, accumulation: int, sections: dict[str, Any]
) -> None:
    """Weights, moments, learning rate and schedule stay; also in bf16, unless check_grad_overflow is false."""
    if "bf16" in sections:
        sections = {**sections, "data_types": {"grad_accum_dtype": "fp32"}}
    pool.run(skip_one, 2, stage, accumulation, sections)


def scales(ctx: RankContext, stage: int, steps: list[bool], keys: dict[str, Any]) -> list[float]:
    engine = engine_of(config_of(stage, **fp16(**keys)))
    found = []
    for number, good in enumerate(steps):
        step(engine, ctx, number, good)
        found.append(engine.loss_scale())
    return found


B, G = BAD, GOOD


@pytest.mark.key(
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
)
@pytest.mark.parametrize(("keys", "steps", "expected"), [
    # two overflows halve it; the step after a window of two good ones doubles it and refills the patience
    ({"hysteresis": 2}, [B, B, G, G, G, B, B], [256, 128, 128, 128, 256, 256, 128]),
    ({"hysteresis": 1}, [B, B, G, G, G], [128, 64, 64, 64, 128]),
    ({"hysteresis": 2}, [G, B, G, B], [256, 256, 256, 128]),
    ({"hysteresis": 2, "consecutive_hysteresis": True}, [G, B, G, B], [256, 256, 256, 256]),
    ({"loss_scale_window": 3, "hysteresis": 1}, [G, G, G, G, B, G], [256, 256, 256, 512, 256, 256]),
    ({"initial_scale_power": 4, "loss_scale_window": 1}, [G, G, G], [16, 32, 64]),
    ({"loss_scale": 32}, [G, G, B, B, G], [32] * 5),
    ({"min_loss_scale": 200, "hysteresis": 1}, [B, G], [200, 200]),
], ids=str)  # fmt: skip
def test_the_scale_follows_deepspeeds_rule(
    pool: WorkerPool, keys: dict[str, Any], steps: list[bool], expected: list[float]
) -> None:
    assert pool.run(scales, 2, 3, steps, keys) == [expected] * 2


def test_the_scale_is_the_same_at_every_stage(pool: WorkerPool) -> None:
    steps = [G, B, B, G, G, G, G]
    found = [pool.run(scales, 2, stage, steps, {})[0] for stage in STAGES]
    assert found == [[256, 256, 128, 128, 128, 256, 256]] * 4


Exhausted = tuple[str, bool, int]


def exhaust(ctx: RankContext, stage: int) -> Exhausted:
    """Return the error of an overflow at the minimum scale, whether the state was kept, and the counted steps."""
    engine = engine_of(config_of(stage, 2, **fp16(min_loss_scale=256, hysteresis=1)))
    step(engine, ctx, 0, GOOD)
    before = whole_state(engine)
    with pytest.raises(LossScaleExhausted) as caught:
        step(engine, ctx, 1, BAD)
    kept = same(whole_state(engine), before)
    step(engine, ctx, 1, GOOD)  # nothing of the failed step is left in the way
    return str(caught.value), kept, engine.global_steps


@pytest.mark.key("fp16.min_loss_scale")
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_at_the_floor_ends_the_run_and_names_the_parameters(pool: WorkerPool, stage: int) -> None:
    """All ranks raise the same message: last layers first, the rank with the infinite input, and a fix."""
    found = pool.run(exhaust, 2, stage)
    assert found[0] == found[1]
    message, kept, steps = found[0]
    assert "minimum of 256" in message and "fp16.min_loss_scale" in message and '"bf16"' in message
    names = [name for name, _ in stack().named_parameters()]
    assert f"{names[-1]} (rank 1)" in message and f"and {len(names) - 5} more" in message
    assert "rank 0" not in message and "ranks" not in message
    assert kept and steps == 2


def diverge(ctx: RankContext, check: bool) -> tuple[bool, bool, str]:
    """Take one bad step in bf16; return whether it was applied, whether the weights are finite, and the output."""
    engine = engine_of(config_of(3, bf16={"enabled": True, "check_grad_overflow": check}))
    out = io.StringIO()
    with redirect_stdout(out):
        for number in range(3):
            step(engine, ctx, number, BAD)
    finite = all(value.isfinite().all() for value in whole_state(engine).values())
    return engine.was_step_applied(), bool(finite), out.getvalue()


@pytest.mark.key("bf16.check_grad_overflow")
def test_bf16_steps_on_without_the_check(pool: WorkerPool) -> None:
    (*ends, said), silent = pool.run(diverge, 2, False)
    assert ends == [True, False] and silent == (True, False, "")
    assert said.startswith("warning: step 1: the gradient is not finite")


@pytest.mark.key("bf16.check_grad_overflow")
def test_a_skipped_step_in_bf16_names_the_parameters_now_and_then(pool: WorkerPool) -> None:
    """Rank 0 reports the first and the second one, not the third."""
    (applied, finite, printed), (*_, silent) = pool.run(diverge, 2, True)
    assert not applied and finite and silent == ""
    first, second = printed.splitlines()
    last = [name for name, _ in stack().named_parameters()][-1]
    assert first.startswith("step 1 is skipped (1 so far)") and f"of {last}, " in first
    assert second.startswith("step 2 is skipped (2 so far)") and "bf16.check_grad_overflow" in second


def cast_input(ctx: RankContext, auto_cast: bool) -> bool:
    """Return whether a float16 model accepts a float32 input."""
    engine = engine_of(config_of(1, fp16={"enabled": True, "auto_cast": auto_cast}))
    try:
        step(engine, ctx, 0, GOOD)
    except RuntimeError as error:
        assert "dtype" in str(error)
        return False
    return {p.dtype for p in engine.module.parameters()} == {torch.float16}


@pytest.mark.key("fp16.enabled", "fp16.auto_cast")
def test_auto_cast_gives_a_float16_model_float16_inputs(pool: WorkerPool) -> None:
    assert pool.run(cast_input, 1, True) == [True]
    assert pool.run(cast_input, 1, False) == [False]


def hand_over(ctx: RankContext, directory: str) -> list[float]:
    """Return the loss scales after loading a dynamic-scale checkpoint as dynamic, fixed and bf16, and a bf16 one as
    dynamic.
    """
    sections: list[dict[str, Any]] = [
        fp16(hysteresis=1),
        fp16(hysteresis=1, initial_scale_power=3),
        fp16(loss_scale=32),
        {"bf16": {"enabled": True}},
    ]
    engines = [engine_of(config_of(1, **section)) for section in sections]
    step(engines[0], ctx, 0, BAD)
    step(engines[3], ctx, 0, GOOD)
    engines[0].save_checkpoint(directory, "fp16")
    engines[3].save_checkpoint(directory, "bf16")
    found = []
    for engine, tag in ((1, "fp16"), (2, "fp16"), (3, "fp16"), (0, "bf16")):
        engines[engine].load_checkpoint(directory, tag)
        found.append(engines[engine].loss_scale())
    return found


def test_a_checkpoint_hands_a_dynamic_scale_to_a_dynamic_scale_only(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(hand_over, 2, str(tmp_path)) == [[128, 32, 1, 128]] * 2
