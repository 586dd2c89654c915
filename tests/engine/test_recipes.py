"""The recipes on the command line: output files, resuming elsewhere, and the exported model.

Three launches take nearly all of the time; all tests check their output.
"""

from __future__ import annotations

import csv
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.config import load
from launcher.config.resolve import micro_batch_of
from tests.cluster.launching import launch
from tests.monitor.test_trace import names_in
from tests.pool.reference import tiny_llama

STEPS, BATCH, LENGTH = 6, 4, 32
BYTES = 260  # ids of the byte-level tokenizer, with room to spare
PROSE = "".join(f"{n} is followed by {n + 1}, and {n * 3} by {n * 3 + 1}.\n" for n in range(700))


WATCHED = {
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"},
    "flops_profiler": {"enabled": True, "output_file": "flops.txt"},
    "comms_logger": {"enabled": True},
}


def json_of(directory: Path, stage: int) -> str:
    """Return a JSON with stage `stage`.

    The learning rate falls, so a restarted schedule would be visible. Stage 3 is monitored.
    """
    path = directory / f"stage{stage}.json"
    content = {
        **(WATCHED if stage == 3 else {}),
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": STEPS if stage == 3 else "auto",
                "warmup_num_steps": 2,
                "warmup_max_lr": 0.01,
            },
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    path.write_text(json.dumps(content))
    return str(path)


def run(directory: Path, ranks: int, stage: int, *arguments: str) -> str:
    """Run a launch that succeeds; return its output."""
    done = launch(
        *("--num_gpus", str(ranks), "--device", "cpu", "--config", json_of(directory, stage)),
        *arguments,
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run pretrain on two ranks at stage 3, resume from step 4 on one at stage 1, and finetune the result."""
    directory = tmp_path_factory.mktemp("recipes")
    config = tiny_llama(vocab=BYTES, layers=2).config
    (directory / "model.json").write_text(json.dumps(config.to_dict()))
    (directory / "prose.txt").write_text(PROSE)
    chat = [
        {
            "messages": [
                {"role": "user", "content": f"after {n}?"},
                {"role": "assistant", "content": f"{n + 1}"},
            ]
        }
        for n in range(40)
    ]
    (directory / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    pretrain = ("pretrain", "--model", "model.json", "--dataset", "prose.txt", "--seq-length", str(LENGTH))
    pretrain += ("--max-steps", str(STEPS), "--save-every", "4", "--eval-every", "3")
    traced = ("--profile", "traces", "--profile-steps", "2-3")
    (directory / "whole.txt").write_text(run(directory, 2, 3, *pretrain, *traced, "--output-dir", "whole"))
    again = (*pretrain, "--output-dir", "resumed", "--resume", "whole/checkpoints/global_step4")
    tune = ("finetune", "--model", "whole/model", "--dataset", "chat.jsonl", "--seq-length", "64")
    tune += ("--max-steps", "3", "--output-dir", "tuned", "--sample", "after 7?")
    with ThreadPoolExecutor() as both:
        doing = [both.submit(run, directory, 1, 1, *again), both.submit(run, directory, 1, 2, *tune)]
        (directory / "tuned.txt").write_text([done.result() for done in doing][1])
    return directory


def test_a_run_writes_what_is_promised(runs: Path) -> None:
    whole = runs / "whole"
    records = metrics(whole)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    promised = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s"}
    for record in records:
        assert promised <= record.keys() and all(record[key] > 0 for key in promised - {"lr"})
        assert record["tokens"] == record["step"] * BATCH * LENGTH
    assert [r["step"] for r in records if "eval_loss" in r] == [3, 6]
    assert records[-1]["loss"] < records[0]["loss"]
    # as in DeepSpeed: two steps of iteration 0, the top after it, and down to 0 at the sixth
    assert [r["lr"] for r in records] == pytest.approx([0, 0, 0.01, 0.01, 0.0075, 0.005])

    page = (whole / "report.html").read_text()
    assert "whole: completed" in page and page.count("<polyline") == 4 and page.count('class="bar"') == 2
    status = json.loads((whole / "logs" / "status.json").read_text())
    assert status["state"] == "completed" and len(status["ranks"]) == 2
    for rank in status["ranks"]:
        counted = rank["counters"]
        assert (
            counted["steps"] == STEPS and counted["counted"] == STEPS - 1 and counted["saved_step"] == STEPS
        )
        phases = [counted[phase] for phase in ("forward", "backward", "step")]
        assert all(seconds > 0 for seconds in phases) and sum(phases) < counted["total"]
        assert 0 < counted["backward_wait"] < counted["backward"] and counted["memory"] > 1 << 20

    config = json.loads((whole / "config.json").read_text())
    assert config["gradient_accumulation_steps"] == 2 and config["zero_optimization"]["stage"] == 3
    assert '"auto"' not in json.dumps(config)
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (whole / "checkpoints" / "latest").read_text().strip() == f"global_step{STEPS}"
    for tag in ("global_step4", f"global_step{STEPS}"):
        assert (whole / "checkpoints" / tag / "meta.json").is_file()
    assert {path.name for path in (whole / "logs").iterdir()} >= {"rank0.log", "rank1.log"}


def test_the_summary_is_of_the_run(runs: Path) -> None:
    summary = json.loads((runs / "whole" / "summary.json").read_text())
    parameters = sum(p.numel() for p in tiny_llama(vocab=BYTES, layers=2).parameters())
    assert summary["world_size"] == 2 and summary["zero_stage"] == 3
    assert summary["degrees"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 1}
    assert summary["model"] == "model.json" and summary["parameters"] == parameters
    assert summary["steps"] == STEPS and summary["tokens"] == STEPS * BATCH * LENGTH
    assert summary["tokens_per_s"] > 0
    assert summary["final_loss"] == metrics(runs / "whole")[-1]["loss"]
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    for rank in summary["ranks"]:
        half = 4 * parameters / 2
        assert rank["peak_memory_bytes"] > 2**20
        assert rank["parameter_bytes"] == pytest.approx(half, rel=0.05)
        assert rank["gradient_bytes"] == pytest.approx(half, rel=0.05)
        assert rank["optimizer_bytes"] == pytest.approx(2 * half, rel=0.05)
        assert rank["step_bytes"] > 2**16
    (expected,) = summary["estimate"]
    resumed = json.loads((runs / "resumed" / "summary.json").read_text())  # its JSON has "auto"
    assert resumed["estimate"][0]["parameter_bytes"] == pytest.approx(4 * parameters, rel=0.05)
    for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert expected[part] == pytest.approx(summary["ranks"][0][part], rel=0.001), part
    assert 0 < expected["step_bytes"] < expected["peak_memory_bytes"]
    assert "Memory, measured" in (runs / "whole" / "report.html").read_text()


def test_a_resumed_run_goes_on_with_the_curve(runs: Path) -> None:
    """One rank at stage 1 after two at stage 3: the same data, losses, learning rates and token counts."""
    whole, resumed = metrics(runs / "whole"), metrics(runs / "resumed")
    assert [record["step"] for record in resumed] == [5, 6]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [r[key] for r in resumed] == pytest.approx([r[key] for r in whole[4:]], rel=1e-5), key
    assert resumed[-1]["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=1e-5)


@pytest.mark.key("csv_monitor.enabled", "csv_monitor.output_path", "csv_monitor.job_name")
def test_monitors_get_the_loss_of_the_metrics(runs: Path) -> None:
    with (runs / "csv" / "job" / "Train_Samples_train_loss.csv").open() as file:
        rows = [(int(at), float(loss)) for at, loss in list(csv.reader(file))[1:]]
    lines = metrics(runs / "whole")
    assert [at for at, _ in rows] == [BATCH * step for step in range(1, STEPS + 1)]
    assert [loss for _, loss in rows] == pytest.approx([line["loss"] for line in lines], rel=1e-5)
    assert all(set(line["phases_ms"]) == {"forward", "backward", "reduce", "step"} for line in lines)


@pytest.mark.key(
    "comms_logger.enabled", "memory_breakdown", "wall_clock_breakdown", "flops_profiler.output_file"
)
def test_times_memory_and_collectives_are_printed(runs: Path) -> None:
    printed = (runs / "whole.txt").read_text()
    assert printed.count(": forward ") == 3 and printed.count(": memory resident: ") == 3
    assert printed.count("collectives of rank 0 of 2") == 1 and "reduce_scatter" in printed
    assert "FLOPs profile of rank 0" in (runs / "flops.txt").read_text()


def test_each_rank_is_traced(runs: Path) -> None:
    for rank in range(2):
        names = names_in(runs / "traces" / f"rank{rank}-steps2-3.json")
        assert "model.layers.1/backward/reduce_scatter" in names


def test_finetune_shows_what_the_model_answers_before_and_after(runs: Path) -> None:
    lines = (runs / "tuned.txt").read_text().splitlines()
    places = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in ("before  after 7? -> ", "after   after 7? -> ")
    ]
    assert places[0] < next(i for i, line in enumerate(lines) if "final loss" in line) < places[1]


def test_what_was_trained_loads_in_transformers(runs: Path) -> None:
    models = {
        name: AutoModelForCausalLM.from_pretrained(runs / name / "model") for name in ("whole", "tuned")
    }
    for name, model in models.items():
        tokenizer = AutoTokenizer.from_pretrained(runs / name / "model")
        ids = tokenizer("after 3?", return_tensors="pt").input_ids
        assert model(input_ids=ids).logits.shape[-1] == BYTES
    before, after = (models[name].get_input_embeddings().weight for name in ("whole", "tuned"))
    off = (before - after).abs().max().item()
    assert 0 < off < 0.1  # it started from the weights that pretraining left
    assert len(metrics(runs / "tuned")) == 3
    with torch.no_grad():
        ids = AutoTokenizer.from_pretrained(runs / "whole" / "model")(
            PROSE[-400:], return_tensors="pt"
        ).input_ids
        loss = models["whole"](input_ids=ids, labels=ids).loss.item()
    assert loss < metrics(runs / "whole")[0]["loss"]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({}, True),
        ({"train_batch_size": 8}, False),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}}, False),
    ],
)
def test_a_recipe_gives_the_micro_batch_where_the_json_leaves_it_open(
    tree: dict[str, Any], says: bool
) -> None:
    assert (micro_batch_of(load(tree), 2, most=5) == 5) == says
