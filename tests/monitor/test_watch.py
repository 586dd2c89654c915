"""Monitoring keys of the JSON work, do not change results, and cost nothing when disabled."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.comm import CollectiveRecord
from launcher.errors import ConfigError
from tests.monitor.watching import Watched, watch
from tests.pool import RankContext, WorkerPool
from tests.zero.training import SEQUENCES, Case, train

WORLD, STEPS = 2, 4


def case_of(stage: int = 0, **config: Any) -> Case:
    return Case(stage=stage, accumulation=2, steps=STEPS, config={"steps_per_print": 2, **config})


@pytest.fixture(scope="module")
def plain(pool: WorkerPool) -> dict[int, list[Watched]]:
    """Return the results without monitoring, by stage."""
    return {stage: pool.run(watch, WORLD, case_of(stage)) for stage in (0, 3)}


def column(directory: Path, name: str) -> list[tuple[int, float]]:
    with (directory / f"Train_Samples_{name}.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["step", name]
    return [(int(samples), float(value)) for samples, value in rows]


def csv_to(directory: Path) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(directory), "job_name": "job"}}


# ---- monitors -------------------------------------------------------------------------------


@pytest.mark.key("csv_monitor.enabled", "csv_monitor.output_path", "csv_monitor.job_name")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_is_the_mean_over_ranks_and_accumulation(
    pool: WorkerPool, tmp_path: Path, stage: int
) -> None:
    trained = pool.run(train, WORLD, case_of(stage, **csv_to(tmp_path)))[0]
    samples = [SEQUENCES * (step + 1) for step in range(STEPS)]
    losses = column(tmp_path / "job", "train_loss")
    assert [at for at, _ in losses] == samples
    assert [loss for _, loss in losses] == pytest.approx(trained.losses, rel=1e-6)
    assert [norm for _, norm in column(tmp_path / "job", "grad_norm")] == trained.grad_norms
    assert column(tmp_path / "job", "lr") == [(at, 0.01) for at in samples]
    names = {path.name for path in (tmp_path / "job").iterdir()}
    assert names == {f"Train_Samples_{name}.csv" for name in ("train_loss", "grad_norm", "lr")}


@pytest.mark.key("csv_monitor.enabled")
def test_the_loss_costs_a_collective_only_while_a_monitor_is_on(
    pool: WorkerPool, tmp_path: Path, plain: dict[int, list[Watched]]
) -> None:
    def calls(records: list[CollectiveRecord]) -> list[tuple[str, str, int]]:
        return [(record.op, record.tag, record.sent) for record in records]

    watched = pool.run(watch, WORLD, case_of(**csv_to(tmp_path)))
    for on, off in zip(watched, plain[0], strict=True):
        assert on.losses == off.losses
        assert on.answers["monitor"] and not off.answers["monitor"]
        for with_it, without in zip(on.steps, off.steps, strict=True):
            assert [call for call in calls(with_it) if call[1] != "root/monitor"] == calls(without)
            assert len(with_it) == len(without) + 1
    # engine.monitor is DeepSpeed's: scripts write through it, on every rank, and it comes once.
    assert (tmp_path / "job" / "Eval_loss.csv").read_text().split() == ["step,loss", "48,1.5"]


@pytest.mark.key("csv_monitor.enabled")
def test_the_loss_scale_and_the_times_come_when_there_are_any(pool: WorkerPool, tmp_path: Path) -> None:
    case = Case(
        dtype="fp16",
        steps=2,
        config={**csv_to(tmp_path), "wall_clock_breakdown": True, "fp16": {"enabled": True, "loss_scale": 8}},
    )
    pool.run(watch, WORLD, case)
    assert column(tmp_path / "job", "loss_scale") == [(12, 8.0), (24, 8.0)]
    times = {
        name: dict(column(tmp_path / "job", f"elapsed_time_ms_{name}"))
        for name in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    }
    assert all(value > 0 for values in times.values() for value in values.values())
    for at in (12, 24):
        parts = times["backward_inner"][at] + times["backward_allreduce"][at]
        assert parts == pytest.approx(times["backward"][at])


def refused(ctx: RankContext, case: Case) -> str:
    with pytest.raises(ConfigError) as caught:
        watch(ctx, case)
    return str(caught.value)


@pytest.mark.key("wandb.enabled")
def test_a_monitor_that_cannot_start_ends_all_ranks_alike(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers = pool.run(refused, WORLD, case_of(**csv_to(tmp_path / "file")))
    assert answers[0] == answers[1] and "csv_monitor cannot write to" in answers[0]


# ---- times and memory -----------------------------------------------------------------------


@pytest.mark.key("wall_clock_breakdown", "steps_per_print")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_times_of_a_step_and_of_waiting_for_reductions(
    pool: WorkerPool, plain: dict[int, list[Watched]], stage: int
) -> None:
    ranks = pool.run(watch, WORLD, case_of(stage, wall_clock_breakdown=True))
    number = r"\d+\.\d ms"
    pattern = rf"step \d: forward {number} \| backward {number} \| reduce {number} \| step {number}"
    assert [bool(re.fullmatch(pattern, line)) for line in ranks[0].said] == [True, True]
    assert [line[:7] for line in ranks[0].said] == ["step 2:", "step 4:"]
    for rank, off in zip(ranks, plain[stage], strict=True):
        assert all(list(times) == ["forward", "backward", "reduce", "step"] for times in rank.times)
        assert all(0 < times["reduce"] < times["backward"] for times in rank.times)
        assert rank.losses == off.losses and off.times == [{}] * STEPS and off.said == []
    assert ranks[1].said == []


@pytest.mark.key("memory_breakdown")
@pytest.mark.parametrize("stage", [0, 3])
def test_memory_of_the_process_and_of_zero(
    pool: WorkerPool, plain: dict[int, list[Watched]], stage: int
) -> None:
    ranks = pool.run(watch, WORLD, case_of(stage, memory_breakdown=True))
    said = ranks[0].said
    assert len(said) == 4 and ranks[1].said == [] and ranks[0].losses == plain[stage][0].losses
    size = r"\d+\.\d\d MiB"
    phases = rf"after forward {size} \| after backward {size} \| after step {size} \| peak {size}"
    assert re.fullmatch(rf"step 2: memory resident: {phases}", said[0])
    found = {what: float(mib) for what, mib in re.findall(r"(\w+) (\d+\.\d\d) MiB", said[3])}
    assert found == {what: round(count / 2**20, 2) for what, count in ranks[0].held.items()}
    assert found["optimizer"] > 0


# ---- FLOPs ----------------------------------------------------------------------------------

# A Llama of width 32, 4 heads of 8, 2 layers, on 3 sequences of 16 tokens: multiply-accumulates by hand.
TOKENS = 3 * 16
LAYER = TOKENS * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 72) + 3 * 4 * 16 * 16 * (8 + 8)
MACS = 2 * LAYER + TOKENS * 32 * 64


def flops(**keys: Any) -> dict[str, Any]:
    return {"flops_profiler": {"enabled": True, **keys}}


@pytest.mark.key("flops_profiler.enabled", "flops_profiler.detailed", "flops_profiler.module_depth")
@pytest.mark.parametrize("stage", [0, 3])
def test_operations_and_parameters_of_each_module(
    pool: WorkerPool, plain: dict[int, list[Watched]], stage: int
) -> None:
    ranks = pool.run(watch, WORLD, case_of(stage, **flops()))
    report, times = ranks[0].said[0], ranks[0].said[1:]
    rows = {line.split()[0]: re.split(r" {2,}", line.strip()) for line in report.splitlines() if line.strip()}
    assert rows["(model)"][2:6] == ["24,224", "100.0%", f"{MACS / 1e6:.2f} M", "100.0%"]
    assert rows["0"][1:5] == ["LlamaDecoderLayer", "10,048", "41.5%", f"{LAYER / 1e3:.2f} k"]
    assert f"{MACS / 1e6:.2f} MMACs, {2 * MACS / 1e6:.2f} MFLOPs" in report
    assert (
        "down_proj" in rows
        and "peak unknown" in report
        and "  of which recomputation:         0 FLOPs" in report
    )
    # It turns the times on, says nothing on other ranks, and changes no number.
    assert len(times) == 2 and all("forward" in line for line in times)
    assert ranks[0].answers["wall_clock_breakdown"] and ranks[1].said == []
    for rank, off in zip(ranks, plain[stage], strict=True):
        assert rank.losses == off.losses
        assert rank.hooks == off.hooks
        assert [len(step) for step in rank.steps] == [len(step) for step in off.steps]


@pytest.mark.key("flops_profiler.profile_step", "flops_profiler.module_depth", "flops_profiler.top_modules")
@pytest.mark.parametrize("step", [0, 1, 3])
def test_which_step_and_how_much_is_reported(pool: WorkerPool, step: int) -> None:
    case = case_of(**flops(profile_step=step, module_depth=step, top_modules=1 + step, detailed=step > 0))
    said = pool.run(watch, 1, case)[0].said
    (report,) = [text for text in said if text.startswith("FLOPs")]
    assert f"in the step after {step} optimizer steps" in report
    # Lines of times come after steps 2 and 4: the report stands where its step ended.
    assert said.index(report) == {0: 0, 1: 0, 3: 1}[step]
    assert ("module by module" in report) == (step > 0)
    depths = re.findall(r"^depth (\d):", report, re.MULTILINE)
    assert depths == [str(depth) for depth in range(step + 1)]
    deepest = report.split(f"depth {step}:")[1].splitlines()[1]
    # Depth 0 is the model, depth 1 LlamaModel and the head; of the many at depth 3 only decoder layers are there.
    assert len(deepest.split(", ")) == {0: 1, 1: 2, 3: 1}[step]
    assert ("q_proj" in report) is False


@pytest.mark.key("flops_profiler.output_file")
def test_the_report_goes_to_a_file(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.txt"
    said = pool.run(watch, 1, case_of(**flops(output_file=str(path))))[0].said
    assert path.read_text().startswith("FLOPs profile of rank 0")
    assert not any(text.startswith("FLOPs") for text in said)


@pytest.mark.key("flops_profiler.recompute_fwd_factor")
def test_recomputed_forwards_are_counted_by_themselves(pool: WorkerPool) -> None:
    backward = {}
    for checkpointing in ("", "json"):
        case = Case(steps=2, checkpointing=checkpointing, config=flops(detailed=False))
        (report,) = pool.run(watch, 1, case)[0].said
        backward[checkpointing] = float(re.findall(r"backward: +([\d.]+) MFLOPs", report)[0])
        recomputed = re.findall(r"of which recomputation: +([\d.]+)", report)[0]
    assert backward["json"] - backward[""] == pytest.approx(float(recomputed), abs=0.02)
    assert float(recomputed) > 1


# ---- collectives ----------------------------------------------------------------------------


def comms(**keys: Any) -> dict[str, Any]:
    return {"comms_logger": {"enabled": True, **keys}}


@pytest.mark.key("comms_logger.enabled", "comms_logger.debug")
@pytest.mark.parametrize("debug", [False, True])
def test_the_log_has_every_collective_of_the_steps(
    pool: WorkerPool, plain: dict[int, list[Watched]], debug: bool
) -> None:
    ranks = pool.run(watch, WORLD, case_of(3, **comms(debug=debug)))
    for rank, off in zip(ranks, plain[3], strict=True):
        counted: dict[tuple[str, str, int], list[int]] = {}
        for record in [record for step in rank.steps for record in step]:
            who = record.tag if debug else record.tag.split("/")[-1]
            counted.setdefault((record.op, who, record.nbytes), []).append(record.sent)
        logged = {key: row for key, row in rank.rows.items() if key in counted}
        assert {key: (row.count, row.moved) for key, row in logged.items()} == {
            key: (len(sent), sum(sent)) for key, sent in counted.items()
        }
        assert all(0 < row.blocked <= row.seconds for row in logged.values())
        assert rank.losses == off.losses and off.rows == {}
    table = ranks[0].printed[ranks[0].printed.index("collectives of rank 0 of 2") :]
    assert ("model.layers.0/backward" in table) == debug
    assert "bus Gbps" in table and "straggler wait ms" in table
    assert "collectives" not in ranks[1].printed
    assert "comms_logger.enabled is false" in plain[3][0].printed


@pytest.mark.key("comms_logger.prof_all", "comms_logger.prof_ops")
def test_only_the_chosen_operations_are_logged(pool: WorkerPool) -> None:
    def logged(**keys: Any) -> set[str]:
        return {operation for operation, _, _ in pool.run(watch, WORLD, case_of(3, **comms(**keys)))[0].rows}

    everything = logged(prof_ops=["all_gather"])
    assert everything >= {"all_gather", "reduce_scatter", "all_reduce"}
    assert logged(prof_all=False, prof_ops=["all_gather_into_tensor"]) == {"all_gather"}


@pytest.mark.key("comms_logger.verbose")
@pytest.mark.parametrize("verbose", [False, True])
def test_each_collective_is_printed_when_asked_for(pool: WorkerPool, verbose: bool) -> None:
    ranks = pool.run(watch, WORLD, case_of(3, **comms(verbose=verbose, debug=True)))
    lines = [line for line in ranks[0].printed.splitlines() if line.startswith("comm ")]
    assert len(lines) == (sum(row.count for row in ranks[0].rows.values()) if verbose else 0)
    if verbose:
        pattern = (
            r"comm reduce_scatter model\.layers\.1/\S+ \| [\d.]+ \w+ \| [\d.]+ ms \| algorithm .* bus .*"
        )
        assert any(re.fullmatch(pattern, line) for line in lines)
    assert not any(line.startswith("comm ") for line in ranks[1].printed.splitlines())
