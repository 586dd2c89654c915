"""The JSON's schedules in an engine on two ranks: torch's numbers, and a resumed run continues with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.comm.plain import decode, encode
from launcher.config import load
from launcher.optim.schedules import build_scheduler
from tests.engine.driving import ADAMW, advance, config_of, engine_of, truth
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

STEPS, HALF = 8, 4
KEYWORDS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 5, 7], "gamma": 0.5},
    "ConstantLR": {"factor": 0.5, "total_iters": 5},
    "LinearLR": {"total_iters": 6},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 6, "eta_min": 1e-4},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 1e-3, "max_lr": 1e-2, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.05, "total_steps": 10},
    "PolynomialLR": {"total_iters": 9, "power": 2.0},
}
OURS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 8},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 8},
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3},
}
RESUMED = ["MultiStepLR", "CyclicLR", "OneCycleLR", "OneCycle"]


def trained(ctx: RankContext, kind: str, params: dict[str, Any]) -> tuple[list[float], list[Any]]:
    """Return losses, and (learning rates, betas) before each step."""
    engine = engine_of(config_of(1, scheduler={"type": kind, "params": params}))
    losses, seen = [], []
    for step in range(STEPS):
        seen.append((engine.get_lr(), engine.get_mom()))
        losses += advance(engine, ctx, [step])
    return losses, seen


def all_trained(ctx: RankContext) -> dict[str, tuple[list[float], list[Any]]]:
    return {kind: trained(ctx, kind, params) for kind, params in KEYWORDS.items()}


@pytest.mark.key("scheduler.type", "scheduler.params")
def test_torch_schedules_train_like_torch(pool: WorkerPool) -> None:
    measured = pool.run(all_trained, 2)[0]
    for kind, keywords in KEYWORDS.items():
        losses, seen = measured[kind]
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
        schedule = getattr(torch.optim.lr_scheduler, kind)(optimizer, **keywords)
        expected = []
        for step in range(STEPS):
            group = optimizer.param_groups[0]
            assert seen[step] == ([group["lr"]], [tuple(group["betas"])]), kind
            expected += truth(optimizer, model, [step])
            schedule.step()
        assert losses == pytest.approx(expected, rel=1e-5), kind


def resumed(ctx: RankContext, directory: str) -> dict[str, bool]:
    """Return whether a run loaded into a fresh engine continues like the saved one: learning rates, betas, losses."""
    same = {}
    for kind in RESUMED:
        params = {**KEYWORDS, **OURS}[kind]
        config = config_of(2, scheduler={"type": kind, "params": params})
        engine = engine_of(config)
        advance(engine, ctx, range(HALF))
        engine.save_checkpoint(f"{directory}/{kind}")
        fresh = engine_of(config)
        fresh.load_checkpoint(f"{directory}/{kind}")
        equal = True
        for step in range(HALF, STEPS):
            equal &= (engine.get_lr(), engine.get_mom()) == (fresh.get_lr(), fresh.get_mom())
            equal &= advance(engine, ctx, [step]) == advance(fresh, ctx, [step])
        same[kind] = equal
    return same


def test_a_resumed_run_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    same = pool.run(resumed, 2, str(tmp_path))[0]
    assert same == dict.fromkeys(RESUMED, True)


@pytest.mark.parametrize("kind", [*KEYWORDS, *OURS])
def test_the_state_of_every_schedule_goes_through_a_checkpoint(kind: str) -> None:
    config = load({"scheduler": {"type": kind, "params": {**KEYWORDS, **OURS}[kind]}}).scheduler
    assert config is not None
    schedules = []
    for _ in range(2):
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
        schedules.append(build_scheduler(config, optimizer))
    saved, fresh = schedules
    for _ in range(HALF):
        saved.optimizer.step()
        saved.step()
    fresh.optimizer.load_state_dict(saved.optimizer.state_dict())
    fresh.load_state_dict(decode(json.loads(json.dumps(encode(saved.state_dict())))))
    for _ in range(STEPS - HALF):
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
        mine, other = ({**s.optimizer.param_groups[0], "params": None} for s in schedules)
        assert mine == other


def one_cycle(ctx: RankContext) -> list[Any]:
    return trained(ctx, "OneCycle", OURS["OneCycle"])[1]


@pytest.mark.key("scheduler.params.cycle_momentum", "scheduler.params.cycle_min_mom")
def test_get_mom_answers_the_cycled_momentum(pool: WorkerPool) -> None:
    betas = [mom[0] for _, mom in pool.run(one_cycle, 2)[0]]
    assert [beta for beta, _ in betas[:5]] == pytest.approx(
        [0.8, 0.9 - 0.1 / 3, 0.9 - 0.2 / 3, 0.8, 0.9 - 0.2 / 3]
    )
    assert {second for _, second in betas} == {0.99}
