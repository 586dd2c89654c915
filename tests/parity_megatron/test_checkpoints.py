"""A Megatron-Core run resumes here, and a launcher run resumes there, with the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import launcher
from launcher.cli.main import main as launch
from tests.checkpoint.test_fsdp import mean
from tests.parity_deepspeed.conftest import run_peer
from tests.parity_deepspeed.forked import Peer
from tests.parity_megatron.runs import (
    AFTER,
    BEFORE,
    CASES,
    DECAY,
    MODELS,
    RATE,
    ROWS,
    batch,
    name_of,
    write_config,
)
from tests.pool import RankContext, WorkerPool

MEGATRON = Peer(
    "tests.parity_megatron.megatron_side", "megatron.core.models.gpt.gpt_model", "megatron.core.optimizer"
)


def run_megatron(
    task: str, world: int, cases: list[tuple[dict[str, Any], Path]], directory: Path
) -> list[list[float]]:
    """Run a task for each (case, its directory); return the losses of each."""
    source, out = directory / f"{task}.json", directory / f"{task}-out.json"
    source.write_text(json.dumps([(case, str(place)) for case, place in cases]))
    logs = [directory / f"{task}-{rank}.log" for rank in range(world)]
    run_peer(MEGATRON, [task, str(source), str(out)], world, logs)
    losses: list[list[float]] = json.loads(out.read_text())
    return losses


def _engine(case: dict[str, Any], world: int) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[case["model"]]))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
    }
    if case.get("dtype"):
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    return launcher.initialize(model=model, optimizer=optimizer, config=config)[0]


def _steps(ctx: RankContext, engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        rows = batch(step).chunk(ctx.world)[ctx.rank]
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss.float()))
    return losses


def goes_on(ctx: RankContext, case: dict[str, Any], place: Path) -> list[float]:
    engine = _engine(case, ctx.world)
    path, _ = engine.load_checkpoint(place)
    assert path is not None and engine.global_steps == BEFORE
    losses = _steps(ctx, engine, BEFORE, AFTER)
    engine.destroy()
    return losses


def begins(ctx: RankContext, case: dict[str, Any], place: Path) -> list[float]:
    engine = _engine(case, ctx.world)
    _steps(ctx, engine, 0, BEFORE)
    engine.save_checkpoint(place)
    losses = _steps(ctx, engine, BEFORE, AFTER)
    engine.destroy()
    return losses


@pytest.mark.parametrize("world", [1, 2, 4])
def test_losses_go_on_in_both_directions(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    cases = [(case, tmp_path / name_of(case)) for case in CASES if case["world"] == world]
    models = {case["model"]: str(write_config(case["model"], tmp_path)) for case, _ in cases}

    theirs = run_megatron("begin", world, [(case, place / "theirs") for case, place in cases], tmp_path)
    exported, ours = [], []
    for (case, place), wanted in zip(cases, theirs, strict=True):
        model = ["--model", models[case["model"]]]
        assert launch(["import", str(place / "theirs"), str(place / "in"), *model]) == 0
        for mine in pool.run(goes_on, case["ranks"], case, place / "in"):
            assert mine == pytest.approx(wanted, rel=_bar(case)), case
        ours.append(pool.run(begins, case["ranks"], case, place / "ours")[0])
        out = str(place / "out")
        assert launch(["export", str(place / "ours"), out, "--format", "megatron", *model]) == 0
        exported.append((case, place / "out"))
    for (case, _), wanted, got in zip(
        cases, ours, run_megatron("go_on", world, exported, tmp_path), strict=True
    ):
        assert got == pytest.approx(wanted, rel=_bar(case)), case


def _bar(case: dict[str, Any]) -> float:
    return 2e-3 if case.get("dtype") else 1e-6  # in 16 bits sums of gradients differ
