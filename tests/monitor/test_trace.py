"""Traces of selected steps, in which collectives have the names of their units."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import launcher
from launcher.cli.recipe_flags import training_parser
from launcher.errors import ConfigError
from launcher.monitor.trace import Trace, steps_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import batch, share
from tests.zero.training import SEQUENCES, Case, config_of, model_of


def names_in(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def traced(ctx: RankContext, directory: str, stage: int) -> int:
    """Run three steps and trace the second; return how many steps ran with a profiler."""
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
        with pytest.raises(ConfigError, match=r"not a range of steps|expected one argument"):
            parser.parse_args(["--profile-steps", wrong])
    assert "unit/phase/operation" in parser.format_help()
