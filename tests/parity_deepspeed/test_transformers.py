"""Hugging Face's Trainer: the same script and JSON with DeepSpeed and with ours, 20 steps, and resumed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_transformers import SCRIPT, run
from tests.parity_deepspeed.conftest import run_ranks

NAMES = ["long0", "long1", "long2", "long3", "long_json"]
WORLD = 2


def run_deepspeed(directory: Path) -> dict[str, Any]:
    command = [sys.executable, SCRIPT, str(directory), *NAMES]
    run_ranks(command, WORLD, [directory / f"rank{rank}.log" for rank in range(WORLD)])
    results: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of every scenario: ours, DeepSpeed's."""
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    return run(ours, WORLD, NAMES), run_deepspeed(theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["whole", "resumed"])
def test_the_trainer_sees_deepspeeds_numbers(
    both: tuple[dict[str, Any], dict[str, Any]], name: str, part: str
) -> None:
    """Losses, gradient norms and learning rates agree to at least five digits."""
    ours, theirs = (side[name][part] for side in both)
    assert ours["engine"].startswith("launcher.") and theirs["engine"].startswith("deepspeed.")
    assert len(ours["losses"]) == 20
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["rates"] == pytest.approx(theirs["rates"])
    if not math.isnan(theirs["norms"][0]):  # DeepSpeed reports none at stage 0
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=5e-6)
