"""Gradients that a script clips, edits in a hook, discards on one rank, or steps with its own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # as a script has it, before any engine is made

from launcher.errors import LauncherError
from launcher.integrations.norms import clip_grad_norm_ as deepspeeds_clip_grad_norm_
from tests.engine.driving import ROWS, config_of, engine_of, microbatches, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points, stack

LR, LIMIT = 0.5, 0.05
SGD = {"type": "SGD", "params": {"lr": LR}}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 1, accumulating": {"stage": 1, "accumulation": 2},
    "stage 2, offloaded": {"stage": 2, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    "stage 3, predivided": {"stage": 3, "gradient_predivide_factor": 4.0},
    "stage 0, of plain losses": {"stage": 0, "plain": True},
}


def sgd_engine(stage: int, **sections: Any) -> Any:
    return engine_of(config_of(stage, optimizer=SGD, **sections))


def step_of(engine: Any, ctx: RankContext, step: int = 0, before: Callable[[], object] | None = None) -> None:
    for part in microbatches(ctx, step, engine.gradient_accumulation_steps()):
        engine.backward(engine(*part))
        if before is not None:
            before()
        engine.step()


def after_one_step(edit: Callable[[nn.Module], object]) -> dict[str, Tensor]:
    """Return plain PyTorch's weights after a step on the global batch."""
    model = stack()
    model(*points(0, ROWS)).backward()
    edit(model)
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return {name: value.detach() for name, value in model.named_parameters()}


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6, msg=name)


# ---- clipping -------------------------------------------------------------------------------------


def clipped(ctx: RankContext, setting: dict[str, Any], limits: tuple[float, float]) -> Any:
    """Return the norm from torch's function, and the weights after the step."""
    plain, (limit, of_json) = setting.get("plain", False), limits
    engine = sgd_engine(**{k: v for k, v in setting.items() if k != "plain"}, gradient_clipping=of_json)
    norms: list[Tensor] = []
    if plain:
        for part in microbatches(ctx, 0):
            engine(*part).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), limit))
        engine.step()
    else:
        step_of(engine, ctx, 0, lambda: norms.append(clip_grad_norm_(engine.module.parameters(), limit)))
    weights = whole_weights(engine)
    step_of(engine, ctx, 1)  # nothing is left of it
    engine.destroy()
    return float(norms[-1]), weights


@pytest.mark.parametrize("limits", [(LIMIT, 0.0), (LIMIT, 1e9), (1e9, LIMIT), (0.0, 1.0)], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_torchs_function_clips_the_step(pool: WorkerPool, setting: str, limits: tuple[float, float]) -> None:
    norms: list[Tensor] = []

    def clip(model: nn.Module) -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), min(limit for limit in limits if limit)
                     if limits[0] else 0.0))  # fmt: skip

    want = after_one_step(clip)
    for norm, weights in pool.run(clipped, 2, SETTINGS[setting], limits):
        assert norm == pytest.approx(float(norms[0]), rel=1e-5)
        assert_same(weights, want)


def refused(ctx: RankContext, stage: int) -> dict[str, str]:
    engine = sgd_engine(stage)
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    parameters = list(engine.module.parameters())
    calls: dict[str, Callable[[], object]] = {
        "a part": lambda: clip_grad_norm_(parameters[1:], 1.0),
        "another norm": lambda: clip_grad_norm_(parameters, 1.0, norm_type=1),
        "by value": lambda: torch.nn.utils.clip_grad_value_(parameters, 1e-4),
        "a backward after it": lambda: (
            clip_grad_norm_(parameters, 1.0), engine.backward(engine(*microbatches(ctx, 1)[0])),
        ),
    }  # fmt: skip
    said = {}
    for name, call in calls.items():
        with pytest.raises(LauncherError) as error:
            call()
        said[name] = str(error.value)
    engine.module.zero_grad()
    engine.backward(engine(*microbatches(ctx, 0)[0]))  # another step begins
    engine.step()
    return said


@STAGES
def test_what_cannot_be_clipped_is_refused(pool: WorkerPool, stage: int) -> None:
    said = pool.run(refused, 2, stage)[0]
    assert "clip_grad_norm_() for a part of the model" in said["a part"]
    assert "with norm_type 1 is not supported" in said["another norm"]
    assert "clip_grad_value_() is not supported" in said["by value"]
    assert "backward was called after clip_grad_norm_()" in said["a backward after it"]


def test_a_model_of_no_engine_is_clipped_by_torch(pool: WorkerPool) -> None:
    pool.run(refused, 1, 0)  # engines were made in a process, and this one
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 0.1)
    assert float(norm) > 1 and all(
        float(p.grad.norm()) <= 0.1 for p in model.parameters() if p.grad is not None
    )
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    assert all(float(p.grad.abs().max()) <= 1e-4 for p in model.parameters() if p.grad is not None)


def clipped_by_deepspeeds_name(ctx: RankContext, stage: int) -> tuple[float, dict[str, Tensor]]:
    engine, norms = sgd_engine(stage), []
    step_of(
        engine, ctx, 0, lambda: norms.append(deepspeeds_clip_grad_norm_(engine.module.parameters(), LIMIT))
    )
    return norms[0], whole_weights(engine)


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeeds_function_clips_the_step(pool: WorkerPool, stage: int) -> None:
    norms: list[Tensor] = []
    want = after_one_step(
        lambda model: norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
    )
    for norm, weights in pool.run(clipped_by_deepspeeds_name, 2, stage):
        assert norm == pytest.approx(float(norms[0]), rel=1e-5)
        assert_same(weights, want)


# ---- hooks ----------------------------------------------------------------------------------------


def hooked(ctx: RankContext, stage: int, throws: bool) -> Any:
    """Return the weights after a step whose gradients a script's hook doubles or discards."""
    engine = sgd_engine(stage)
    seen: list[tuple[int, ...]] = []

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(tuple(parameter.grad.shape))
        if throws:
            parameter.grad = None
        else:
            parameter.grad.mul_(2)

    handles = [p.register_post_accumulate_grad_hook(hook) for p in engine.module.parameters()]
    step_of(engine, ctx)
    for handle in handles:
        handle.remove()
    weights = whole_weights(engine)
    number = len(seen)
    step_of(engine, ctx, 1)
    assert len(seen) == number
    engine.destroy()
    return weights, seen


def edit(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(factor)


@pytest.mark.parametrize("throws", [False, True], ids=["doubles", "throws away"])
@STAGES
def test_a_late_hook_sees_and_changes_gradients(pool: WorkerPool, stage: int, throws: bool) -> None:
    want = after_one_step(lambda model: edit(model, 0 if throws else 2))
    shapes = sorted(tuple(p.shape) for p in stack().parameters())
    for weights, seen in pool.run(hooked, 2, stage, throws):
        assert sorted(seen) == shapes
        assert_same(weights, want)


# ---- other optimizers -----------------------------------------------------------------------------


def foreign(ctx: RankContext, stage: int) -> str:
    engine = sgd_engine(stage)
    other = torch.optim.AdamW(engine.module.parameters(), lr=1.0)
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    with pytest.raises(LauncherError) as error:
        other.step()
    engine.step()
    beside = nn.Linear(2, 1)
    beside(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(beside.parameters()).step()
    engine.destroy()
    return str(error.value)


@STAGES
def test_a_second_optimizer_of_the_same_parameters_is_refused(pool: WorkerPool, stage: int) -> None:
    assert "AdamW.step() was called on parameters of an engine" in pool.run(foreign, 2, stage)[0]


# ---- on some ranks --------------------------------------------------------------------------------


def thrown_on_one(ctx: RankContext, stage: int, how: str) -> str:
    engine = sgd_engine(stage)
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    if ctx.rank == 1:
        if how == "p.grad":
            next(engine.module.parameters()).grad = None
        else:
            (engine.module if how == "module" else engine.optimizer).zero_grad()
    with pytest.raises(LauncherError) as error:
        engine.step()
    engine.zero_grad()
    step_of(engine, ctx)  # and it goes on
    engine.destroy()
    return str(error.value)


@pytest.mark.parametrize("how", ["module", "optimizer", "p.grad"])
@STAGES
def test_gradients_thrown_away_on_one_rank_are_told_on_all(pool: WorkerPool, stage: int, how: str) -> None:
    for said in pool.run(thrown_on_one, 2, stage, how):
        assert "1 of 2 ranks discarded gradients" in said
