"""`enable_sanity_checks`: mistakes that are silent without it are errors with an explanation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from launcher.comm import record_collectives
from launcher.errors import LauncherError
from tests.engine.driving import STAGES, advance, config_of, engine_of, microbatches
from tests.pool import RankContext, WorkerPool

KEY = pytest.mark.key("zero_optimization.enable_sanity_checks")


def made(stage: int, checks: bool, **zero: Any) -> Any:
    section = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "enable_sanity_checks": checks,
        **zero,
    }
    return engine_of(config_of(stage, zero_optimization=section))


def another_order(engine: Any, ctx: RankContext) -> None:
    """Ranks gather different units at the same time: each gets the other's bytes."""
    blocks = list(engine.module.blocks)
    with engine.zero.gathered(blocks[ctx.rank].parameters()), record_collectives() as records:
        pass
    assert not records


def another_copy(engine: Any, ctx: RankContext) -> None:
    if ctx.rank == 1:
        engine.module.last.bias.data.add_(1e-6)


def not_a_number(engine: Any, ctx: RankContext) -> None:
    if ctx.rank == 1:
        engine.zero.slots["blocks.1.up.weight"].leaf.register_hook(lambda grad: grad * float("nan"))


def stumble(ctx: RankContext, stage: int, mistake: Callable[..., None], **zero: Any) -> str:
    """Return the error of an engine with checks; one without reports nothing."""
    said = ""
    for checks in (False, True):
        engine = made(stage, checks, **zero)
        advance(engine, ctx, range(2))
        mistake(engine, ctx)
        try:
            advance(engine, ctx, [2])
        except LauncherError as error:
            assert checks
            said = str(error)
        engine.destroy()
    return said


@KEY
def test_another_order_of_gathers(pool: WorkerPool) -> None:
    for said in pool.run(stumble, 2, 3, another_order):
        assert "collective order mismatch (gathers along dp): #1 since the last step" in said
        assert "all_gather blocks.0/gather of 288 elements on rank 0" in said
        assert "all_gather blocks.1/gather of 288 elements on rank 1" in said


@KEY
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_copies_that_differ(pool: WorkerPool, stage: int) -> None:
    for said in pool.run(stumble, 2, stage, another_copy):
        assert "parameters differ on rank 1 from lower ranks: unit root" in said


@KEY
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_not_finite(pool: WorkerPool, stage: int) -> None:
    for said in pool.run(stumble, 2, stage, not_a_number):
        assert "gradients are not finite: blocks.1.up.weight" in said


def sound(ctx: RankContext, zero: dict[str, Any]) -> None:
    plain, checked = made(3, False, **zero), made(3, True, **zero)
    assert advance(checked, ctx, range(4)) == advance(plain, ctx, range(4))
    with torch.no_grad():
        checked(*microbatches(ctx, 9)[0])
    assert advance(checked, ctx, [4]) == advance(plain, ctx, [4])


@KEY
def test_a_sound_run_goes_on_as_without(pool: WorkerPool) -> None:
    pool.run(sound, 2, {})
    pool.run(sound, 4, {"mics_shard_size": 2, "stage3_param_persistence_threshold": 20})
