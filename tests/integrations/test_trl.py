"""PEFT's LoRA and TRL's trainers, unchanged, on our engine: two ranks beside one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_transformers import found, run

pytest.importorskip("peft", reason="pip install peft")
pytest.importorskip("trl", reason="pip install trl")

SCRIPT = str(Path(__file__).with_name("trl_scenarios.py"))
STAGES = [2, 3]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every scenario found: ours on two ranks, then the plain ones on one."""
    directory, kinds = tmp_path_factory.mktemp("trl"), ("lora", "sft", "dpo")
    ours = run(directory, 2, [f"{kind} {stage}" for kind in kinds for stage in STAGES], SCRIPT)
    return ours | run(directory, 1, [f"{kind} plain" for kind in kinds], SCRIPT)


def check_alike(ours: dict[str, Any], plain: dict[str, Any], steps: int) -> None:
    assert ours["engine"] == "launcher.engine.engine" != plain["engine"]
    assert len(ours["losses"]) == steps and len(set(ours["losses"])) > 1
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_lora_is_trained_and_saved(results: dict[str, Any], stage: int) -> None:
    ours, plain = found(results, f"lora {stage}"), found(results, "lora plain")
    check_alike(ours, plain, 5)
    assert len(ours["adapter"]) == 8 and all(norm > 0 for norm in ours["adapter"].values())
    assert ours["adapter"] == pytest.approx(plain["adapter"], rel=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_sft_trainer(results: dict[str, Any], stage: int) -> None:
    check_alike(found(results, f"sft {stage}"), found(results, "sft plain"), 4)


@pytest.mark.parametrize("stage", STAGES)
def test_dpo_trainer(results: dict[str, Any], stage: int) -> None:
    """Against a reference model that does not learn: the margins are those of one process."""
    ours, plain = found(results, f"dpo {stage}"), found(results, "dpo plain")
    check_alike(ours, plain, 3)
    assert ours["margins"][-1] != 0
    assert ours["margins"] == pytest.approx(plain["margins"], rel=1e-3, abs=1e-6)
