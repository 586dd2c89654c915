"""The recipes' loop with stages: losses, counts, evaluation, output files, and errors that name the location."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor, nn

from launcher.cli.recipe_flags import training_parser
from launcher.config.ranks import mesh_lines, places
from launcher.pipeline.schedules.actions import ActionKind
from launcher.pipeline.timeline.recording import read
from launcher.run import Run
from launcher.train import Training
from tests.config.test_data_efficiency import sections
from tests.engine.test_curriculum import LENGTHS, RISING, STEPS
from tests.pipeline.running import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, tiny_llama
from tests.pool.worker_pool import RanksFailed


class Rows:
    """Rows with prompts of 1 to 9 tokens, so that microbatches have different numbers of loss tokens."""

    def __init__(self, number: int = 48) -> None:
        self.ids, self.reads = batch(0, number), 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        labels = self.ids[index].clone()
        labels[: 1 + index % 9] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def fit(ctx: RankContext, directory: str, pipeline: dict[str, Any], tp: int, microbatches: int) -> int:
    """Run with a curriculum; return how many rows this rank read for training."""
    monitor = {"enabled": True, "output_path": directory, "job_name": "monitor"}
    more = {**sections(RISING), "tensor_parallel": {"autotp_size": tp}, "csv_monitor": monitor}
    engine = engine_of(config_of(1, microbatches, pipeline, **more), tiny_llama(layers=4))
    args = training_parser("finetune", "").parse_args(["--seed", "0", "--eval-every", "2"])
    printed = open(os.devnull if ctx.rank else f"{directory}/printed", "w")  # noqa: SIM115
    console = Console(file=printed, width=200, quiet=ctx.rank > 0)
    run = Run(args, engine.resolved, Path(directory), DEVICE, console, ctx.rank)
    rows = Rows()
    run.describe(engine, "tiny", "rows")
    Training(run, engine, rows, Rows(21), STEPS, "tiny").fit()
    engine.destroy()
    printed.close()
    return rows.reads


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    found = {name: directory / name for name in ("one", "stages", "mesh")}
    for path in found.values():
        path.mkdir()
    one = pool.run(fit, 1, str(found["one"]), {}, 1, 8)
    stages = pool.run(fit, 2, str(found["stages"]), {"stages": 2, "schedule": "interleaved"}, 1, 4)
    mesh = pool.run(fit, 4, str(found["mesh"]), {"stages": 2}, 1, 2)
    assert one == [1 + 8 * STEPS]
    assert stages == [1 + 8 * STEPS, 1]  # one row says how long all are
    assert mesh == [1 + 4 * STEPS, 1 + 4 * STEPS, 1, 1]
    return found


@pytest.mark.parametrize("name", ["stages", "mesh"])
def test_records_are_those_of_one_process(runs: dict[str, Path], name: str) -> None:
    """Token-weighted losses of unequal microbatches over stages and dp; a curriculum; evaluation."""
    want, got = records(runs["one"]), records(runs[name])
    assert [record["seqlen"] for record in got] == LENGTHS
    for one, other in zip(want, got, strict=True):
        assert one.keys() == other.keys()
        for key in ("step", "tokens", "lr", "seqlen"):
            assert one[key] == other[key]
        for key in ("loss", "grad_norm", "eval_loss"):
            assert other.get(key, 0) == pytest.approx(one.get(key, 0), rel=1e-5)
    written = (runs[name] / "monitor" / "Train_Samples_eval_loss.csv").read_text().splitlines()
    evaluated = [(8 * record["step"], record["eval_loss"]) for record in got if "eval_loss" in record]
    assert written == ["step,eval_loss", *(f"{samples},{loss}" for samples, loss in evaluated)]


def test_what_a_run_tells_of_its_stages(runs: dict[str, Path]) -> None:
    one, mesh = (json.loads((runs[name] / "summary.json").read_text()) for name in ("one", "mesh"))
    assert (
        mesh["parameters"] == one["parameters"] == sum(p.numel() for p in tiny_llama(layers=4).parameters())
    )
    assert "pipeline" not in one and not (runs["one"] / "schedule.json").exists()
    told = mesh["pipeline"]
    assert (told["schedule"], told["stages"], told["chunks"], told["microbatches"]) == ("1f1b", 2, 1, 2)
    assert 0 < told["bubble"] < 1 and told["most_held"] == [2, 1]
    assert [rank["coordinates"] for rank in mesh["ranks"]] == [
        {"pp": p, "dp": d} for p in (0, 1) for d in (0, 1)
    ]
    printed = (runs["mesh"] / "printed").read_text()
    assert "stage 1  2     3" in printed and "pp 2 x dp 2 on " in printed
    assert "bubble" in printed and "at most 2 activations held" in printed


def test_the_measured_schedule_is_that_of_the_run(runs: dict[str, Path]) -> None:
    measured = read(runs["stages"] / "schedule.json")
    now = time.time()  # the clock of all processes of this machine
    assert all(now - 600 < span.start <= span.end < now for spans in measured.spans for span in spans)
    assert (measured.name, measured.stages, measured.chunks, measured.microbatches) == (
        "interleaved",
        2,
        2,
        4,
    )
    ends = {span.action: span.end for spans in measured.spans for span in spans}
    assert len(ends) == 2 * 4 * 4
    for spans in measured.spans:
        for span in spans:
            if span.action.kind is ActionKind.FORWARD and span.action.stage:
                before = next(a for a in ends if a.kind is ActionKind.FORWARD and a.stage == span.action.stage - 1
                              and a.microbatch == span.action.microbatch)  # fmt: skip
                assert span.start >= ends[before]  # one clock for both ranks


def fail(ctx: RankContext) -> None:
    engine = engine_of(config_of(0, 4, {"stages": 2}), tiny_llama(layers=4))
    if ctx.rank == 1:
        calls = []

        def burst(module: nn.Module, args: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("bad weather")

        engine.runtime.staged.blocks[0][1].register_forward_pre_hook(burst)
    rows = iter([{"input_ids": batch(0, 2), "labels": batch(0, 2)}] * 4)
    engine.train_batch(rows if ctx.rank == 0 else None)


def test_an_error_says_in_which_action_it_happened(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        pool.run(fail, 2)
    text = failed.value.failures[1]
    assert "ValueError: bad weather" in text
    assert "stage 1 (rank 1), F1.2: forward of microbatch 2" in text


def test_which_rank_is_what() -> None:
    assert places(1, 4, 1) == [] and mesh_lines({"pp": 1, "dp": 4, "tp": 1}, "host") == []
    assert places(2, 1, 2) == ["stage 0, tp 0", "stage 0, tp 1", "stage 1, tp 0", "stage 1, tp 1"]
    assert mesh_lines({"pp": 4, "dp": 1, "tp": 1}, "host") == ["pp 4 on host: one stage per rank"]
    assert mesh_lines({"pp": 1, "dp": 2, "tp": 2}, "host") == [
        "dp 2 x tp 2 on host",
        "       dp 0  dp 1",
        "ranks  0 1   2 3",
    ]
    assert mesh_lines({"pp": 2, "dp": 2, "tp": 2}, "host") == [
        "pp 2 x dp 2 x tp 2 on host",
        "         dp 0  dp 1",
        "stage 0  0 1   2 3",
        "stage 1  4 5   6 7",
    ]
