"""A rehearsed run holds what a real one holds, to the byte."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher
from launcher.config import load
from launcher.errors import ConfigError
from launcher.estimate.dry_run import DryRun, batch_of, dry_run, rehearse
from launcher.estimate.live import Counting
from launcher.models.build import build_on_meta, load_config
from tests.pool import RankContext, WorkerPool

WORLD, SEQUENCE = 2, 128
TP = {"tensor_parallel": {"autotp_size": 2}}
BF16 = {"bf16": {"enabled": True}}
RECOMPUTE = {"activation_checkpointing": {"partition_activations": False}}


def config_of(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
CASES = {
    "0": config_of(0),
    "1": config_of(1),
    "2": config_of(2),
    "3": config_of(3),
    "3, every unit freed": config_of(
        3, {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    ),
    "1, bf16": config_of(1, **BF16),
    "3, bf16": config_of(3, **BF16),
    "0, tp": config_of(0, **TP),
    "2, tp, sequence": config_of(2, tensor_parallel={"autotp_size": 2, "sequence_parallel": True}),
    "2, recompute": config_of(2, **RECOMPUTE),
    "2, optimizer offloaded": config_of(2, OFFLOADED),
    "0, stages": config_of(0, pipeline={"stages": 2}),
    "3, zero bubble": config_of(
        3, pipeline={"stages": 2, "schedule": "zb-h1"}, gradient_accumulation_steps=4
    ),
    "3, all offloaded": config_of(3, {**OFFLOADED, "offload_param": {"device": "cpu"}}),
}


def real(ctx: RankContext, configs: list[dict[str, Any]]) -> list[DryRun]:
    found = []
    for config in configs:
        model = build_on_meta(load_config("default"))
        make = lambda model=model, config=config: launcher.initialize(  # noqa: E731
            model=model, config=config, device=torch.device("cpu")
        )[0]
        found.append(rehearse(make, batch_of(load(config), SEQUENCE), Counting))
    return found


@pytest.fixture(scope="module")
def runs(pool: WorkerPool) -> dict[str, tuple[DryRun, ...]]:
    """By case: what each rank held."""
    found = pool.run(real, WORLD, [copy.deepcopy(config) for config in CASES.values()], timeout=400)
    return dict(zip(CASES, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_holds_what_a_run_holds(runs: dict[str, tuple[DryRun, ...]], name: str) -> None:
    for rank in range(WORLD) if "pipeline" in CASES[name] else [0]:
        model = build_on_meta(load_config("default"))
        played = dry_run(model, load(CASES[name]), world=WORLD, rank=rank, sequence=SEQUENCE)
        compare(played, runs[name][rank], 0.01 if "pipeline" in CASES[name] else 0.002)  # messages under way


def compare(played: DryRun, wanted: DryRun, off: float) -> None:
    assert played.between.model_states == wanted.between.model_states
    assert abs(played.between.total - wanted.between.total) < 4096
    assert played.phase == wanted.phase
    for phase, peak in wanted.peaks.items():
        assert played.peaks[phase] == pytest.approx(peak, rel=off), phase
    assert played.at_peak.activations > 2 * SEQUENCE * 256 * 4  # more than one hidden state
    assert played.at_peak.total == pytest.approx(played.peak, rel=0.005)


def test_more_ranks_hold_less() -> None:
    few, many = (
        dry_run(build_on_meta(load_config("default")), load(config_of(3)), world=n, sequence=SEQUENCE)
        for n in (2, 1024)
    )
    assert many.between.optimizer < few.between.optimizer / 400
    assert many.world == 1024


def test_a_disk_is_not_written_to(tmp_path: Path) -> None:
    on_disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ConfigError, match="offload_optimizer"):
        dry_run(build_on_meta(load_config("default")), load(config_of(2, on_disk)), world=2)
    assert not list(tmp_path.iterdir())
