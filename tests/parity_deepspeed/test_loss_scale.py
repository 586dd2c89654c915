"""The loss scale, step by step: DeepSpeed's DynamicLossScaler and ours with the same overflows."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from launcher.config import load
from launcher.optim.loss_scale import LossScale
from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.scales import EXHAUSTED, follow_scale

STEPS = 60
KEYS = [
    {
        "initial_scale_power": power,
        "loss_scale_window": window,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
        "min_loss_scale": floor,
    }
    for power, window, hysteresis, consecutive, floor in itertools.product(
        (16, 4), (1, 2, 5), (1, 2, 3), (False, True), (1, 24)
    )
]


def cases() -> list[dict[str, Any]]:
    """Return each set of keys with few, with some and with many overflows."""
    made = []
    for i, keys in enumerate(KEYS):
        for share in (0.02, 0.2, 0.6):
            rng = random.Random(f"{i} {share}")
            made.append({"keys": keys, "overflows": [rng.random() < share for _ in range(STEPS)]})
    return made


@pytest.mark.key(
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
)
def test_the_paths_are_deepspeeds(tmp_path: Path) -> None:
    given = cases()
    theirs = run_deepspeed("loss_scales", given, 1, tmp_path)
    assert any(path[-1] == EXHAUSTED for path in theirs) and any(len(path) == STEPS for path in theirs)
    for case, expected in zip(given, theirs, strict=True):
        scaler = LossScale.of(load({"fp16": {"enabled": True, **case["keys"]}}).fp16)
        assert follow_scale(scaler.update, lambda s=scaler: s.scale, case["overflows"]) == expected, case[
            "keys"
        ]  # type: ignore[misc]
