"""The effect of each `scheduler` key on training: learning rates, momentum and weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from launcher.config import load
from launcher.errors import ConfigError
from launcher.optim.schedules import build_scheduler

STEPS = 12
Params = dict[str, Any]


def weights(kind: str, params: Params, groups: int = 1) -> tuple[list[list[float]], list[float]]:
    """Run Adam on a parabola; return [learning rate, beta] of each group before each step, and the final weights."""
    config = load({"scheduler": {"type": kind, "params": params}}).scheduler
    assert config is not None
    parameters = [torch.nn.Parameter(torch.full((), 5.0)) for _ in range(groups)]
    optimizer = torch.optim.Adam([{"params": [p]} for p in parameters], lr=0.02)
    schedule = build_scheduler(config, optimizer)
    trace = []
    for _ in range(STEPS):
        trace.append([x for group in optimizer.param_groups for x in (float(group["lr"]), group["betas"][0])])
        optimizer.zero_grad()
        sum(p**2 for p in parameters).backward()  # type: ignore[union-attr]
        optimizer.step()
        schedule.step()
    return trace, [p.item() for p in parameters]


def rates(kind: str, params: Params, group: int = 0, groups: int = 1) -> list[float]:
    return [row[2 * group] for row in weights(kind, params, groups)[0]]


def momentum(kind: str, params: Params) -> list[float]:
    return [row[1] for row in weights(kind, params)[0]]


WARMUP: Params = {"warmup_num_steps": 4, "warmup_max_lr": 0.1}
DECAY = WARMUP | {"total_num_steps": 8}
COSINE: Params = {"warmup_num_steps": 4, "total_num_steps": 8}
RANGE: Params = {"lr_range_test_step_size": 4}
CYCLE: Params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}
AFTER = CYCLE | {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}
UP_DOWN: Params = {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "mode": "exp_range", "gamma": 0.9}
ONE: Params = {"max_lr": 0.1, "total_steps": STEPS}

# type, its other keywords, the key, its other value (that it has otherwise stands in the keywords, or is the default)
CASES: list[tuple[str, Params, str, Any]] = [
    ("WarmupLR", WARMUP, "warmup_min_lr", 0.05),
    ("WarmupLR", WARMUP, "warmup_max_lr", 0.2),
    ("WarmupLR", WARMUP, "warmup_num_steps", 8),
    ("WarmupLR", WARMUP, "warmup_type", "linear"),
    ("WarmupLR", WARMUP, "last_batch_iteration", 2),
    ("WarmupDecayLR", DECAY, "total_num_steps", 16),
    ("WarmupCosineLR", COSINE, "total_num_steps", 16),
    ("WarmupCosineLR", COSINE, "warmup_min_ratio", 0.5),
    ("WarmupCosineLR", COSINE, "cos_min_ratio", 0.5),
    ("WarmupCosineLR", COSINE, "warmup_num_steps", 6),
    ("WarmupCosineLR", COSINE, "warmup_type", "linear"),
    ("LRRangeTest", RANGE, "lr_range_test_min_lr", 0.01),
    ("LRRangeTest", RANGE, "lr_range_test_step_size", 8),
    ("LRRangeTest", RANGE, "lr_range_test_step_rate", 2.0),
    ("LRRangeTest", RANGE, "lr_range_test_staircase", True),
    ("OneCycle", CYCLE, "cycle_min_lr", 0.02),
    ("OneCycle", CYCLE, "cycle_max_lr", 0.2),
    ("OneCycle", CYCLE, "cycle_first_step_size", 6),
    ("OneCycle", CYCLE, "cycle_second_step_size", 2),
    ("OneCycle", CYCLE, "cycle_first_stair_count", 2),
    ("OneCycle", CYCLE, "cycle_second_stair_count", 2),
    ("OneCycle", CYCLE, "cycle_momentum", False),
    ("OneCycle", CYCLE, "cycle_min_mom", 0.5),
    ("OneCycle", CYCLE, "cycle_max_mom", 0.95),
    ("OneCycle", AFTER, "decay_step_size", 0),
    ("OneCycle", AFTER, "decay_lr_rate", 0.1),
    ("OneCycle", AFTER, "decay_mom_rate", 0.001),
    ("StepLR", {"step_size": 3}, "step_size", 4),
    ("StepLR", {"step_size": 3}, "gamma", 0.5),
    ("MultiStepLR", {"milestones": [3, 5]}, "milestones", [4]),
    ("ConstantLR", {}, "factor", 0.5),
    ("ConstantLR", {}, "total_iters", 3),
    ("LinearLR", {}, "start_factor", 0.5),
    ("LinearLR", {}, "end_factor", 0.5),
    ("ExponentialLR", {"gamma": 0.9}, "gamma", 0.8),
    ("CosineAnnealingLR", {"T_max": 8}, "T_max", 5),
    ("CosineAnnealingLR", {"T_max": 8}, "eta_min", 0.01),
    ("CosineAnnealingWarmRestarts", {"T_0": 2}, "T_0", 3),
    ("CosineAnnealingWarmRestarts", {"T_0": 2}, "T_mult", 2),
    ("CyclicLR", UP_DOWN, "base_lr", 0.02),
    ("CyclicLR", UP_DOWN, "max_lr", 0.2),
    ("CyclicLR", UP_DOWN, "step_size_up", 4),
    ("CyclicLR", UP_DOWN, "step_size_down", 5),
    ("CyclicLR", UP_DOWN, "mode", "triangular2"),
    ("CyclicLR", UP_DOWN, "gamma", 0.8),
    ("CyclicLR", UP_DOWN, "cycle_momentum", False),
    ("CyclicLR", UP_DOWN, "base_momentum", 0.5),
    ("CyclicLR", UP_DOWN, "max_momentum", 0.95),
    ("OneCycleLR", ONE, "max_lr", 0.2),
    ("OneCycleLR", ONE, "total_steps", 2 * STEPS),
    ("OneCycleLR", {"max_lr": 0.1, "epochs": 2, "steps_per_epoch": 6}, "epochs", 3),
    ("OneCycleLR", {"max_lr": 0.1, "epochs": 2, "steps_per_epoch": 6}, "steps_per_epoch", 9),
    ("OneCycleLR", ONE, "pct_start", 0.5),
    ("OneCycleLR", ONE, "anneal_strategy", "linear"),
    ("OneCycleLR", ONE, "cycle_momentum", False),
    ("OneCycleLR", ONE, "base_momentum", 0.5),
    ("OneCycleLR", ONE, "max_momentum", 0.97),
    ("OneCycleLR", ONE, "div_factor", 5.0),
    ("OneCycleLR", ONE, "final_div_factor", 2.0),
    ("OneCycleLR", ONE, "three_phase", True),
    ("PolynomialLR", {"total_iters": 8}, "total_iters", 6),
    ("PolynomialLR", {"total_iters": 8}, "power", 2.0),
]


def marked(case: tuple[str, Params, str, Any]) -> Any:
    return pytest.param(
        *case, id=f"{case[0]}-{case[2]}", marks=pytest.mark.key(f"scheduler.params.{case[2]}")
    )


@pytest.mark.key("scheduler", "scheduler.type", "scheduler.params")
@pytest.mark.parametrize(("kind", "params", "key", "other"), [marked(case) for case in CASES])
def test_every_key_changes_the_training(kind: str, params: Params, key: str, other: Any) -> None:
    before, after = weights(kind, params), weights(kind, params | {key: other})
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.key("scheduler.params.warmup_type", "scheduler.params.warmup_num_steps")
def test_the_warm_up_goes_along_a_line_or_a_logarithm() -> None:
    line = rates("WarmupLR", WARMUP | {"warmup_type": "linear"})
    assert line[:7] == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1, 0.1])
    log = rates("WarmupLR", WARMUP)
    assert log[2] == pytest.approx(0.05) and log[3] > 0.075
    left_out = rates("WarmupLR", {"warmup_num_steps": 4})
    assert left_out[-1] == 0.02  # the optimizer's own


@pytest.mark.key("scheduler.params.total_num_steps", "scheduler.params.cos_min_ratio")
def test_the_decays_end_where_they_are_told_to() -> None:
    assert rates("WarmupDecayLR", DECAY)[9:] == [0.0] * 3
    assert rates("WarmupCosineLR", COSINE | {"cos_min_ratio": 0.25})[9:] == [0.005] * 3


def test_the_cosine_falls_from_the_first_step_after_the_warm_up() -> None:
    """Four steps from 0.02 to a quarter of it; the very first step has iteration -1."""
    quarters = [(1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3, 4)]
    falling = [0.005 + 0.015 * height for height in quarters]
    assert rates("WarmupCosineLR", COSINE | {"cos_min_ratio": 0.25})[5:9] == pytest.approx(falling)


@pytest.mark.key("scheduler.params.lr_range_test_min_lr", "scheduler.params.lr_range_test_staircase")
def test_the_range_test_grows_by_its_first_rate() -> None:
    assert rates("LRRangeTest", RANGE)[:3] == pytest.approx([1e-3, 1.25e-3, 1.5e-3])
    stairs = rates("LRRangeTest", RANGE | {"lr_range_test_staircase": True})
    assert stairs == pytest.approx([1e-3] * 4 + [2e-3] * 4 + [3e-3] * 4)


@pytest.mark.key("scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr", "scheduler.params.cycle_min_mom",
                 "scheduler.params.cycle_max_mom", "scheduler.params.decay_lr_rate")  # fmt: skip
def test_one_cycle_goes_up_and_down_and_momentum_the_other_way() -> None:
    up_and_down = [0.01, 0.0325, 0.055, 0.0775, 0.1, 0.0775, 0.055, 0.0325, 0.01]
    assert rates("OneCycle", CYCLE)[:9] == pytest.approx(up_and_down)
    assert momentum("OneCycle", CYCLE)[:9] == pytest.approx(
        [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9]
    )
    assert rates("OneCycle", AFTER)[9:11] == pytest.approx([0.01 / 1.25, 0.01 / 1.5])


@pytest.mark.key(
    *(f"scheduler.params.{key}" for key in ("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr"))
)
@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("WarmupLR", WARMUP, "warmup_min_lr"),
        ("WarmupDecayLR", DECAY, "warmup_max_lr"),
        ("LRRangeTest", RANGE, "lr_range_test_min_lr"),
        ("OneCycle", CYCLE, "cycle_min_lr"),
        ("CyclicLR", UP_DOWN, "max_lr"),
        ("OneCycleLR", ONE, "max_lr"),
    ],
)
def test_a_list_has_one_value_for_each_group(kind: str, params: Params, key: str) -> None:
    each = params | {key: [0.01, 0.03]}
    assert rates(kind, each, 0, 2) == rates(kind, params | {key: 0.01})
    assert rates(kind, each, 1, 2) == rates(kind, params | {key: 0.03})
    with pytest.raises(ConfigError, match=r"scheduler\.params"):
        rates(kind, each, 0, 3)


def test_only_betas_are_cycled() -> None:
    config = load({"scheduler": {"type": "OneCycle", "params": CYCLE}}).scheduler
    assert config is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.3)
    schedule = build_scheduler(config, optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["momentum"] == 0.3 and schedule.get_mom() is None
