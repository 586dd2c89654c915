"""Traces of chosen steps, in which collectives carry the names of their units; and a recipe that is watched whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher
from launcher.cli.recipe_flags import training_parser
from launcher.errors import ConfigError
from launcher.monitor.trace import Trace, steps_of
from tests.cluster.launching import launch
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import batch, share, tiny_llama
from tests.zero.training import SEQUENCES, Case, config_of, model_of


def names_in(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def traced(ctx: RankContext, directory: str, stage: int) -> int:
    """Three steps, of which the second is traced; how many steps ran with a profiler."""
    case = Case(stage=stage)
    engine, *_ = launcher.initialize(
        model=model_of(case), config=config_of(case, ctx.world), device=torch.device("cpu")
    )
    profiled = 0
    with Trace(directory, rank=ctx.rank, steps=(2, 2)) as trace:
        for step in (1, 2, 3):
            with trace.step(step):
                profiled += torch.autograd._profiler_enabled()
                for ids in share(batch(step, SEQUENCES), ctx.rank, ctx.world):
                    engine.backward(engine(input_ids=ids, labels=ids).loss)
                    engine.step()
    return profiled


def test_collectives_have_the_names_of_their_units(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(traced, 2, str(tmp_path), 3) == [1, 1]
    for rank in range(2):
        names = names_in(tmp_path / f"rank{rank}-steps2-2.json")
        for unit in ("model.layers.0", "model.layers.1", "model.embed_tokens", "lm_head"):
            assert {f"{unit}/forward/all_gather", f"{unit}/backward/reduce_scatter"} <= names
        assert {"root/norm/all_reduce", "model.layers.0/unshard", "model.layers.0/reduce"} <= names


def test_a_run_that_ends_early_still_writes_its_trace(tmp_path: Path) -> None:
    with Trace(tmp_path, rank=0, steps=(1, 9)) as trace, trace.step(1):
        torch.ones(2).sum()
    assert "aten::sum" in names_in(tmp_path / "rank0-steps1-9.json")
    with Trace(None, rank=0, steps=(1, 9)) as trace, trace.step(1):
        assert not torch.autograd._profiler_enabled()


def test_the_flag_takes_a_range_of_steps() -> None:
    parser = training_parser("pretrain", "Pretrain.")
    assert parser.parse_args([]).profile_steps == (3, 4) and parser.parse_args([]).profile is None
    assert parser.parse_args(["--profile-steps", "5-7"]).profile_steps == steps_of("5 - 7") == (5, 7)
    assert steps_of("4") == (4, 4)
    for wrong in ("0", "7-5", "x", "3-", "-3"):
        with pytest.raises(ConfigError, match=r"no range of steps|expected one argument"):
            parser.parse_args(["--profile-steps", wrong])
    assert "unit/phase/operation" in parser.format_help()


STEPS = 4


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """pretrain on two ranks with everything on: its directory, and what it printed."""
    directory = tmp_path_factory.mktemp("watched")
    (directory / "model.json").write_text(json.dumps(tiny_llama(vocab=260, layers=2).config.to_dict()))
    (directory / "prose.txt").write_text("".join(f"{n} comes before {n + 1}.\n" for n in range(600)))
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"},
        "flops_profiler": {"enabled": True, "output_file": "flops.txt"},
        "comms_logger": {"enabled": True},
    }
    (directory / "ds.json").write_text(json.dumps(config))
    flags = ("--model", "model.json", "--dataset", "prose.txt", "--seq-length", "32", "--output-dir", "out")
    flags += ("--max-steps", str(STEPS), "--profile", "traces", "--profile-steps", "2-3")
    done = launch(
        *("--num_gpus", "2", "--device", "cpu", "--config", "ds.json", "pretrain"), *flags, cwd=directory
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return directory, done.stdout


@pytest.mark.key("csv_monitor.enabled", "csv_monitor.output_path", "csv_monitor.job_name")
def test_a_recipe_writes_the_loss_of_its_metrics(watched: tuple[Path, str]) -> None:
    directory, _ = watched
    metrics = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
    with (directory / "csv" / "job" / "Train_Samples_train_loss.csv").open() as file:
        rows = [(int(at), float(loss)) for at, loss in list(csv.reader(file))[1:]]
    assert [at for at, _ in rows] == [8, 16, 24, 32]
    assert [loss for _, loss in rows] == pytest.approx([line["loss"] for line in metrics], rel=1e-5)
    assert all(set(line["phases_ms"]) == {"forward", "backward", "reduce", "step"} for line in metrics)


@pytest.mark.key(
    "comms_logger.enabled", "memory_breakdown", "wall_clock_breakdown", "flops_profiler.output_file"
)
def test_a_recipe_prints_times_memory_and_collectives(watched: tuple[Path, str]) -> None:
    directory, printed = watched
    assert printed.count(": forward ") == 2 and printed.count(": memory resident: ") == 2
    assert printed.count("collectives of rank 0 of 2") == 1 and "reduce_scatter" in printed
    assert "FLOPs profile of rank 0" in (directory / "flops.txt").read_text()


def test_a_recipe_traces_each_rank(watched: tuple[Path, str]) -> None:
    directory, _ = watched
    for rank in range(2):
        names = names_in(directory / "traces" / f"rank{rank}-steps2-3.json")
        assert "model.layers.1/backward/reduce_scatter" in names
