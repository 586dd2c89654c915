"""Learning rates and betas of DeepSpeed's schedules and ours are equal for the same keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.config import load
from launcher.optim.schedules import build_scheduler
from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.rates import follow

WARMUP: list[dict[str, Any]] = [
    {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 10},
    {"warmup_min_lr": 0.001, "warmup_max_lr": 0.03, "warmup_num_steps": 7},
    {"warmup_max_lr": 0.02, "warmup_num_steps": 1},
    {"warmup_max_lr": 0.02},
]
COSINE: list[dict[str, Any]] = [
    {"total_num_steps": 25, "warmup_num_steps": 10},
    {"total_num_steps": 25, "warmup_num_steps": 10, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1},
    {"total_num_steps": 40, "warmup_num_steps": 1},
    {"total_num_steps": 20},
]
RANGE: list[dict[str, Any]] = [
    {},
    {"lr_range_test_step_size": 7},
    {"lr_range_test_min_lr": 3e-4, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.5},
    {"lr_range_test_min_lr": 3e-4, "lr_range_test_step_size": 4, "lr_range_test_staircase": True},
]
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 6}
DECAY = {"decay_step_size": 4, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01}
ONE_CYCLE: list[dict[str, Any]] = [
    {},
    {"cycle_first_step_size": 2000},
    {"cycle_second_step_size": 9},
    {"cycle_second_step_size": 0},
    {"cycle_second_step_size": 11, **DECAY},
    {"cycle_momentum": False, **DECAY},
    {"cycle_min_mom": 0.6, "cycle_max_mom": 0.95},
    {"decay_step_size": 3, "decay_lr_rate": 0.5},
    {"decay_step_size": 3, "decay_mom_rate": 0.002},
    {"decay_lr_rate": 0.5},
    {"cycle_first_stair_count": 3},
    {"cycle_first_stair_count": 4, "cycle_second_stair_count": 0},
    {"cycle_first_stair_count": 0, "cycle_second_stair_count": 3, "cycle_second_step_size": 7},
    {"cycle_first_stair_count": 5, "cycle_second_stair_count": 2, "cycle_second_step_size": 13},
]
LATE: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}},
    {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 25}},
    {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 25}},
    {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 7}},
    {"type": "OneCycle", "params": CYCLE},
]
LISTS: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {"warmup_min_lr": [0.0, 0.01], "warmup_max_lr": [0.02, 0.03]}},
    {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_min_lr": [0.001, 0.002]}},
    {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": [0.02, 0.03], "warmup_num_steps": 10, "total_num_steps": 25},
    },
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": [1e-4, 1e-3], "lr_range_test_step_size": 7}},
    {"type": "OneCycle", "params": CYCLE | {"cycle_min_lr": [1e-3, 2e-3], "cycle_max_lr": [0.01, 0.05]}},
    {"type": "OneCycle", "params": CYCLE | {"cycle_min_mom": [0.7, 0.8], "cycle_max_mom": [0.85, 0.9]}},
]
TYPES = ["log", "linear"]
CASES: list[dict[str, Any]] = [
    *({"type": "WarmupLR", "params": p | {"warmup_type": kind}} for p in WARMUP for kind in TYPES),
    *(
        {"type": "WarmupDecayLR", "params": p | {"warmup_type": kind, "total_num_steps": total}}
        for p in WARMUP
        for kind in TYPES
        for total in (25, 40)
    ),
    *({"type": "WarmupCosineLR", "params": p | {"warmup_type": kind}} for p in COSINE for kind in TYPES),
    {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 25, "warmup_num_steps": 5}},
    *({"type": "LRRangeTest", "params": p} for p in RANGE),
    *({"type": "OneCycle", "params": CYCLE | p} for p in ONE_CYCLE),
    *({"type": case["type"], "params": case["params"] | {"last_batch_iteration": 6}} for case in LATE),
    *({**case, "groups": 2} for case in [*LATE, *LISTS]),
]


def name(case: dict[str, Any]) -> str:
    groups = f"-groups={case['groups']}" if "groups" in case else ""
    return case["type"] + groups + "".join(f"-{key}={value}" for key, value in case["params"].items())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    directory: Path = tmp_path_factory.mktemp("ds")
    rates = run_deepspeed("schedules", CASES, 1, directory)
    return {name(case): values for case, values in zip(CASES, rates, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=name)
def test_rates_and_betas_are_deepspeeds(theirs: dict[str, list[list[float]]], case: dict[str, Any]) -> None:
    config = load({"scheduler": {"type": case["type"], "params": case["params"]}}).scheduler
    assert config is not None
    mine = follow(lambda optimizer: build_scheduler(config, optimizer), case.get("groups", 1))
    for row, expected in zip(mine, theirs[name(case)], strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-15)
