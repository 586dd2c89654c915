"""`launch memory-estimate` for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.cli.memory_estimate import device_bytes
from launcher.errors import ConfigError

DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
ASKED = [
    "memory-estimate",
    "--config",
    str(DS_CONFIGS / "zero3.json"),
    "--model",
    "default",
    "--seq-length",
    "64",
]


def test_one_object_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--num-gpus", "8", "--gpu", "1GiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (rank,) = told["per_rank"]
    assert told["fits"] is True and told["inputs"]["num_gpus"] == 8
    states = rank["parameters_bytes"] + rank["gradients_bytes"] + rank["optimizer_bytes"]
    assert rank["model_states_bytes"] == states
    assert rank["peak_bytes"] == max(rank["phases"].values()) > states


def test_a_run_that_does_not_fit_is_told_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--gpu", "10MiB"]) == 1
    assert "does NOT fit" in capsys.readouterr().out


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--num-gpus", "2", "--rank", "2"]) == 2
    assert "--rank" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="lots"):
        device_bytes("lots")
    assert device_bytes("80GiB") == 80 << 30
    assert device_bytes("24 GB") == 24 * 10**9
