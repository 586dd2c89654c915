"""Learning rates, value by value, of DeepSpeed's schedules and ours for the same keywords."""

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
]


def name(case: dict[str, Any]) -> str:
    return case["type"] + "".join(f"-{key}={value}" for key, value in case["params"].items())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    directory: Path = tmp_path_factory.mktemp("ds")
    rates = run_deepspeed("schedules", CASES, 1, directory)
    return {name(case): values for case, values in zip(CASES, rates, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_learning_rates_are_deepspeeds(theirs: dict[str, list[float]], case: dict[str, Any]) -> None:
    config = load({"scheduler": case}).scheduler
    assert config is not None
    mine = follow(lambda optimizer: build_scheduler(config, optimizer))
    assert mine == pytest.approx(theirs[name(case)], rel=1e-9, abs=1e-12)
