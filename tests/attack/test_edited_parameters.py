"""Parameters that a script edits, freezes, hooks or steps itself between the engine's steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import launcher
from launcher.engine.fragments import safe_get_full_fp32_param
from launcher.errors import LauncherError
from launcher.optim import one_pass
from launcher.zero import GatheredParameters
from tests.engine.driving import config_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SGD = {"type": "SGD", "params": {"lr": 1.0}}


def engine_of(stage: int, optimizer: Any = None, model: nn.Module | None = None, **sections: Any) -> Any:
    """Return an engine for two layers, each with a weight of ones."""
    made = model or ones()
    config = config_of(stage, train_batch_size=2, optimizer=SGD, **sections)
    return launcher.initialize(model=made, config=config, optimizer=optimizer, device=DEVICE)


def ones() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def backward(engine: Any) -> None:
    """Compute gradients of 4 for both layers: those of the sum of outputs, for inputs of ones."""
    x = torch.ones(1, 2, dtype=next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().sum())


def values(engine: Any) -> list[Tensor]:
    with GatheredParameters(list(engine.module.parameters())):
        return [p.detach().float().clone() for p in engine.module.parameters()]


# ---- steps of its own ---------------------------------------------------------------------------


def stepped(ctx: RankContext, stage: int, how: str) -> list[Any]:
    model = ones()
    mine = torch.optim.SGD(model.parameters(), lr=1.0, fused=True) if how == "own" else None
    engine, optimizer, *_ = engine_of(stage, mine, model, gradient_clipping=0.5)
    rule = {"engine": engine, "returned": optimizer, "own": mine}[how]
    if how != "engine":
        torch.optim.lr_scheduler.StepLR(rule, 5)  # wraps the step
    backward(engine)
    assert one_pass.rule_of(optimizer.inner) is not None  # the quick way of the engine's own steps stays open
    rule.step()
    found = values(engine)
    steps = engine.global_steps
    engine.destroy()
    return [*found, steps]


@STAGES
def test_a_step_of_the_optimizer_is_one_of_the_engine(pool: WorkerPool, stage: int) -> None:
    wanted, *others = (pool.run(stepped, 2, stage, how)[0] for how in ("engine", "returned", "own"))
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(found[:-1], wanted[:-1], strict=True))
        assert found[-1] == wanted[-1] == 1


# ---- values ---------------------------------------------------------------------------------------


def clamped(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.data.clamp_(-0.25, 0.25)


def filled(engine: Any) -> None:
    for parameter in engine.module.parameters():
        nn.init.constant_(parameter, 0.25)


def loaded(engine: Any) -> None:
    engine.module.load_state_dict({name: torch.full((2, 2), 0.25) for name in ("0.weight", "1.weight")})


def replaced(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


EDITS = {edit.__name__: edit for edit in (clamped, filled, loaded, replaced)}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "offloaded": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


def edited(ctx: RankContext, stage: int, sections: dict[str, Any], edit: str) -> list[float]:
    sections = {name: dict(section) for name, section in sections.items()}
    engine = engine_of(stage, **sections)[0]
    backward(engine)
    engine.step()
    EDITS[edit](engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    backward(engine)
    engine.step()
    masters = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    found = [*values(engine), *(master for master in masters if master is not None)]
    engine.destroy()
    return [float(value) for tensor in found for value in (tensor.min(), tensor.max())]


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_stays(pool: WorkerPool, stage: int, kind: str, edit: str) -> None:
    if kind == "offloaded" and stage == 0:
        stage = 1  # DeepSpeed's rule: stage 0 offloads nothing
    wanted = -0.25 if edit == "clamped" else 0.25  # a step of -4 came before
    for found in pool.run(edited, 2, stage, KINDS[kind], edit):
        assert found == pytest.approx([wanted] * len(found))


def precise(ctx: RankContext) -> list[float]:
    """Edit one element; the others keep the digits that bf16 cannot represent."""
    engine = engine_of(1, bf16={"enabled": True})[0]
    for group in engine.optimizer.param_groups:
        group["lr"] = 2.0**-12
    backward(engine)
    engine.step()
    with torch.no_grad():
        engine.module[0].weight[0, 0] = 3.0
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    backward(engine)
    engine.step()
    return [float(v) for v in safe_get_full_fp32_param(engine.module[0].weight).flatten()]  # type: ignore[union-attr]


def test_what_is_not_edited_keeps_its_digits(pool: WorkerPool) -> None:
    edited_, *others = pool.run(precise, 2)[0]
    assert edited_ == 3.0 and others == pytest.approx([1 - 2 * 2.0**-12] * 3, rel=1e-6)
    assert others[0] != 1.0


# ---- freezing and hooks ---------------------------------------------------------------------------


def frozen(ctx: RankContext, stage: int) -> list[float]:
    engine = engine_of(stage)[0]
    engine.module[0].weight.requires_grad_(False)
    backward(engine)
    engine.step()
    first = values(engine)
    engine.module[0].weight.requires_grad_(True)
    backward(engine)
    engine.step()
    second = values(engine)
    engine.destroy()
    return [float(each[0, 0]) for each in (*first, *second)]


@STAGES
def test_a_parameter_that_is_frozen_later_stays_as_it_is(pool: WorkerPool, stage: int) -> None:
    first, second, *after = pool.run(frozen, 2, stage)[0]
    assert (first, second) == (1.0, 1.0 - 2.0) and after[0] != 1.0


def thawed(ctx: RankContext, stage: int) -> str:
    model = ones()
    model[0].weight.requires_grad_(False)
    engine = engine_of(stage, model=model)[0]
    engine.module[0].weight.requires_grad_(True)
    backward(engine)
    with pytest.raises(LauncherError) as error:
        engine.step()
    return str(error.value)


@STAGES
def test_a_parameter_that_is_to_be_trained_later_is_refused(pool: WorkerPool, stage: int) -> None:
    assert "'0.weight' was frozen in initialize()" in pool.run(thawed, 2, stage)[0]


def hooked(ctx: RankContext, stage: int) -> list[Any]:
    engine = engine_of(stage)[0]
    handle = engine.module[0].weight.register_hook(lambda gradient: gradient * 0)
    backward(engine)
    engine.step()
    first = [float(each[0, 0]) for each in values(engine)]
    handle.remove()
    backward(engine)
    engine.step()
    return [*first, float(values(engine)[0][0, 0]) != first[0]]


@STAGES
def test_a_hook_that_is_registered_later_is_called(pool: WorkerPool, stage: int) -> None:
    assert pool.run(hooked, 2, stage) == [[1.0, -1.0, True]] * 2
