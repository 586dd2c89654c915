"""`launch calibrate`: the device entry, from a run's own steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.config import load
from launcher.monitor.devices import device
from launcher.plan.layout import Layout, as_json, layout_of
from launcher.plan.speed import step_time
from launcher.plan.work import work_of
from tests.pool.reference import tiny_llama

SEQUENCE = 128
LAYOUTS = [
    Layout(dp=2, stage=2, micro=4, accumulation=2),
    Layout(tp=2, pp=2, dp=2, stage=1, accumulation=8, schedule="interleaved", chunks=2, recompute=True),
    Layout(dp=4, stage=3, micro=2, offload="all"),
    Layout(dp=2, cp=2, stage=3, micro=2, offload="optimizer"),
]


def seconds_of(layout: Layout, factor: float) -> float:
    """Return the seconds of a step on H100s with a multiple of their usual speed."""
    h100 = device("h100")
    slow = replace(h100, matmul_share=h100.matmul_share * factor, traffic_share=h100.traffic_share * factor)
    work = work_of(tiny_llama(layers=4).config, SEQUENCE)
    return step_time(work, layout, slow, min(h100.per_node, layout.world), exact=True).total


def run_of(directory: Path, layout: Layout, seconds: float, steps: int = 8) -> Path:
    """Create the files of a recipe's run with these step times, after slower steps."""
    config = as_json(layout)
    config["train_batch_size"] = layout.dp * layout.micro * layout.accumulation
    times = [9.0] * 5 + [seconds] * (steps - 5)
    (directory / "model").mkdir(parents=True)
    tiny_llama(layers=4).config.save_pretrained(directory / "model")
    tokens = steps * config["train_batch_size"] * SEQUENCE
    summary = {"world_size": layout.world, "steps": steps, "tokens": tokens}
    (directory / "summary.json").write_text(json.dumps(summary))
    (directory / "config.json").write_text(json.dumps(config))
    lines = (json.dumps({"step": at + 1, "step_time_s": each}) for at, each in enumerate(times))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.in_words)
def test_the_layout_of_a_configuration_is_read_back(layout: Layout) -> None:
    assert layout_of(load(as_json(layout)), layout.world) == layout


@pytest.mark.parametrize("factor", [0.25, 1.2])
def test_with_the_row_steps_are_predicted_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    layout = LAYOUTS[0]
    run = run_of(tmp_path / "run", layout, seconds_of(layout, factor))
    out = tmp_path / "here.json"
    assert main(["calibrate", str(run), "--gpu", "h100", "--out", str(out)]) == 0
    found, h100 = device(str(out)), device("h100")
    assert found.matmul_share == pytest.approx(h100.matmul_share * factor, rel=1e-3)
    assert found.traffic_share == pytest.approx(h100.traffic_share * factor, rel=1e-3)
    assert layout.in_words() in found.calibrated_on
    assert replace(found, matmul_share=0, traffic_share=0, calibrated_on="") == replace(
        h100, matmul_share=0, traffic_share=0, calibrated_on=""
    )
    assert f"a step took {seconds_of(layout, factor):.4g} s" in capsys.readouterr().out


def spoil(run: Path, name: str, text: str | None) -> None:
    (run / name).unlink() if text is None else (run / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("summary.json", None, "summary.json"),
        ("summary.json", "{", "contains no readable run"),
        ("summary.json", '{"tokens": 1, "steps": 0, "world_size": 2}', "contains no readable run"),
        ("summary.json", '{"tokens": 1e400, "steps": 1, "world_size": 2}', "contains no readable run"),
        ("summary.json", '{"tokens": 2048, "steps": 8, "world_size": 0}', "no ranks, no tokens"),
        ("metrics.jsonl", '{"step_time_s": NaN}\n' * 8, "no ranks, no tokens, or invalid step times"),
        ("metrics.jsonl", '{"step_time_s": 1}\n' * 5, "has 5 steps, and the first 5 are ignored as warm-up"),
        ("metrics.jsonl", '{"step_time_s": 1e-9}\n' * 8, "communication alone is predicted to take"),
        ("model/config.json", None, "has no model/config.json"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, words: str
) -> None:
    run = run_of(tmp_path / "run", LAYOUTS[0], 1.0)
    spoil(run, name, text)
    assert main(["calibrate", str(run), "--gpu", "h100"]) == 2
    assert words in capsys.readouterr().err


def test_without_a_file_the_row_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", LAYOUTS[0], seconds_of(LAYOUTS[0], 1.0))
    assert main(["calibrate", str(run), "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    row: dict[str, Any] = json.loads(printed[printed.index("{") :])
    assert row["matmul"] == pytest.approx(device("h100").matmul_share, rel=1e-3)
