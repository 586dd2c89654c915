"""With non-finite numbers a run ends, keeps its earlier state, and reports where they came from."""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import Engine
from launcher.errors import NotFiniteError
from launcher.monitor.metrics import MetricsWriter, read_metrics
from tests.attack.test_shipped_configs import ROOT, made_material
from tests.cluster.launching import launch
from tests.engine.driving import STAGES, advance, config_of, engine_of, microbatches
from tests.pool import RankContext, WorkerPool

STEPS = 6


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_material(tmp_path_factory.mktemp("material"))


def pretrained(ctx: RankContext, config: str, output: str, bad: list[int], *flags: str) -> str | None:
    """Run the recipe with a NaN loss in the steps `bad`; return how it ends."""
    os.environ |= {"LAUNCHER_CONFIG": config, "LAUNCHER_OUTPUT_DIR": output, "LAUNCHER_DEVICE": "cpu"}
    run = Engine.train_microbatches

    def spoiled(engine: Any, batches: Any, weights: Any) -> Tensor:
        spoils = engine.global_steps + 1 in bad
        return run(engine, batches, [math.nan if spoils else weight for weight in weights])

    with patch.object(sys, "argv", ["pretrain", *flags]), patch.object(Engine, "train_microbatches", spoiled):
        try:
            runpy.run_path(str(ROOT / "recipes" / "pretrain.py"), run_name="__main__")
        except NotFiniteError as error:
            return str(error)
    return None


def run(
    pool: WorkerPool,
    material: Path,
    output: Path,
    bad: list[int],
    *flags: str,
    **sections: Any,
) -> str | None:
    tree = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, **sections}
    data = (
        "--model",
        str(material / "model"),
        "--dataset",
        str(material / "prose.txt"),
        "--seq-length",
        "32",
    )
    common = (*data, "--max-steps", str(STEPS), "--save-every", "1")
    said: list[str | None] = pool.run(pretrained, 2, json.dumps(tree), str(output), bad, *common, *flags)
    assert said[0] == said[1]
    return said[0]


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_ends_after_steps_that_are_not_finite(
    pool: WorkerPool,
    material: Path,
    tmp_path: Path,
    stage: int,
) -> None:
    said = run(pool, material, tmp_path, [3, 4, 5, 6], zero_optimization={"stage": stage})
    assert said is not None and "the last 3 steps are not finite: training ends after step 5" in said
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step2"
    assert str(tmp_path / "checkpoints" / "global_step2") in said
    assert not (tmp_path / "model").exists()
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] is None for line in lines] == [False, False, True, True, True]
    assert lines[2]["nonfinite"] == ["loss", "grad_norm"] and "nonfinite" not in lines[1]
    summary = strict((tmp_path / "summary.json").read_text())
    assert summary["final_loss"] is None and summary["nonfinite_steps"] == [3, 4, 5]
    assert "not finite" in summary["stopped"]


def test_a_run_whose_last_step_is_not_finite_exports_nothing(
    pool: WorkerPool,
    material: Path,
    tmp_path: Path,
) -> None:
    said = run(pool, material, tmp_path, [STEPS])
    assert said is not None and f"the last step is not finite: training ends after step {STEPS}" in said
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"global_step{STEPS - 1}"
    assert not (tmp_path / "model").exists()


def test_the_flag_says_how_many(pool: WorkerPool, material: Path, tmp_path: Path) -> None:
    said = run(pool, material, tmp_path, [2, 3], "--max-nonfinite-steps", "1")
    assert said is not None and "ends after step 2" in said


def test_steps_that_a_dynamic_loss_scale_skips_are_none(
    pool: WorkerPool,
    material: Path,
    tmp_path: Path,
) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    assert run(pool, material, tmp_path, [], fp16=fp16) is None
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["skipped_steps"] > 3  # one after the other
    assert (tmp_path / "model").is_dir()


def test_launch_ends_with_1_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from launcher.errors import NotFiniteError\nraise NotFiniteError('the last 3 steps are not finite')\n"
    )
    done = launch("--num_gpus", "1", "--device", "cpu", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: the last 3 steps are not finite" in done.stderr and "Traceback" not in done.stderr


class Fragile(nn.Module):
    """The second block divides by zero if the input requests it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 8), Root(), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.third(self.second(self.first(x))).squeeze(-1), y)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / (x.detach().abs().max() < 1e6)


def warned(ctx: RankContext, stage: int, accumulation: int) -> tuple[list[str], list[list[float]]]:
    engine = engine_of(config_of(stage, accumulation, gradient_clipping=1.0), Fragile())
    said: list[str] = []
    engine.telemetry.say = said.append
    losses = [advance(engine, ctx, [0, 1])]
    hooks = sum(len(module._forward_hooks) for module in engine.module.modules())
    for step in (2, 3, 4):
        for x, y in microbatches(ctx, step, accumulation):
            engine.backward(engine(x * (1e9 if ctx.rank == 1 else 1), y))
            engine.step()
    assert sum(len(module._forward_hooks) for module in engine.module.modules()) == hooks
    return said, losses


@pytest.mark.parametrize("stage", STAGES)
def test_a_loop_of_the_user_is_told_once_where_it_began(pool: WorkerPool, stage: int) -> None:
    (first, losses), (second, same) = pool.run(warned, 2, stage, 2)
    assert len(first) == 1 and second == [] and losses == same
    assert first[0].startswith("warning: step 3: the gradient is not finite")
    assert "on rank 1, is second." in first[0]


def beyond_backward(ctx: RankContext) -> list[str]:
    """The loss is finite, its gradient is not."""
    engine = engine_of(config_of(2, gradient_clipping=1.0))
    said: list[str] = []
    engine.telemetry.say = said.append
    ((x, y),) = microbatches(ctx, 0)
    loss = engine(x, y)
    engine.backward(loss + (loss.detach() * 0 + (loss - loss)).sqrt())
    engine.step()
    return said


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_named(pool: WorkerPool) -> None:
    (said,) = pool.run(beyond_backward, 2)[0]
    assert "All outputs were finite" in said and "blocks.2.up.weight" in said


def test_metrics_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = '{"step": 1, "loss": NaN, "lr": 0.1}\n'  # as it was written once
    path.write_text(old)
    with MetricsWriter(path, resume_step=1) as metrics:
        metrics.write(2, math.inf, grad_norm=None, lr=0.1, tokens=1, tokens_per_s=1.0, step_time_s=1.0)
    first, second = (strict(line) for line in path.read_text().splitlines())
    assert first["loss"] is None and first["nonfinite"] == ["loss"]
    assert second["nonfinite"] == ["loss"] and read_metrics(path)[1]["loss"] is None
