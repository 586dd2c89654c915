"""`summary.json` and the table at the end."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from launcher import files
from launcher.monitor.summary import (
    EstimatedMemory,
    RankMemory,
    _rows,
    median_tokens_per_s,
    print_summary,
    write_json,
    write_summary,
)


def records(rates: list[float]) -> list[dict[str, Any]]:
    return [
        {"step": i, "loss": 5.0 - i, "tokens": 100 * i, "tokens_per_s": rate, "step_time_s": 0.5}
        for i, rate in enumerate(rates, start=1)
    ]


def memory(rank: int, peak: int = 300 << 20) -> RankMemory:
    return RankMemory(
        rank=rank, peak_memory_bytes=peak, parameter_bytes=4000, gradient_bytes=2000, optimizer_bytes=8000
    )


def write(path: Path, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "world_size": 2,
        "degrees": {"dp": 2},
        "model": "llama-10m",
        "parameters": 10_200_000,
        "records": records([1, 1, 1, 1, 1, 100, 300, 200]),
        "ranks": [memory(1, 500 << 20), memory(0)],
        "zero_stage": 2,
    }
    return write_summary(path, **{**options, **changes})


def test_the_file_has_what_was_promised(tmp_path: Path) -> None:
    returned = write(tmp_path / "out" / "summary.json")
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert content == returned
    assert content["degrees"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 1}
    assert (content["world_size"], content["model"], content["parameters"]) == (2, "llama-10m", 10_200_000)
    assert (content["steps"], content["tokens"], content["final_loss"]) == (8, 800, -3.0)
    assert content["tokens_per_s"] == 200
    assert content["train_time_s"] == 4.0
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    assert content["ranks"][0] == {
        "rank": 0, "coordinates": {}, "peak_memory_bytes": 300 << 20,
        "parameter_bytes": 4000, "gradient_bytes": 2000, "optimizer_bytes": 8000, "step_bytes": None,
    }  # fmt: skip
    assert content["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert content["zero_stage"] == 2


def test_a_last_loss_that_is_not_finite_is_no_final_loss(tmp_path: Path) -> None:
    rows = records([1, 2, 3])
    rows[0]["eval_loss"] = 7.0
    rows[2]["loss"] = float("nan")
    content = write(tmp_path / "s.json", records=rows)
    assert (content["final_loss"], content["final_eval_loss"]) == (None, 7.0)
    assert content["nonfinite_steps"] == [rows[2]["step"]]


def test_a_gradient_that_is_not_finite_counts_unless_the_loss_scale_skipped_it(tmp_path: Path) -> None:
    rows = records([1, 2, 3, 4])
    for row, skipped in zip(rows, [0, 1, 1, 1], strict=True):
        row["skipped_steps"] = skipped
    for row in rows[1:3]:
        row["grad_norm"] = float("inf")
    steps = [row["step"] for row in rows]
    assert write(tmp_path / "s.json", records=rows)["nonfinite_steps"] == steps[1:3]
    content = write(tmp_path / "s.json", records=rows, dynamic_loss_scale=True)
    assert content["nonfinite_steps"] == steps[2:3] and content["final_loss"] is not None
    stopped = write(tmp_path / "s.json", records=rows, stopped="the weights are not finite")
    assert stopped["final_loss"] is None, "it has no model to show"


def test_a_run_without_a_step(tmp_path: Path) -> None:
    content = write(tmp_path / "s.json", records=[])
    assert (content["steps"], content["final_loss"], content["tokens_per_s"]) == (0, None, None)


def test_the_median_leaves_the_warm_up_out() -> None:
    assert median_tokens_per_s(records([1, 1, 10, 30, 20]), warmup_steps=2) == 20
    assert median_tokens_per_s(records([1, 10]), warmup_steps=5) == 10
    assert median_tokens_per_s([]) is None


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.json"
    write_json(path, {"old": 1})

    def fail(*_: object) -> None:
        raise OSError("killed before the rename")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="killed"):
        write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}


def test_the_table_says_how_it_went_and_where_it_lies(tmp_path: Path) -> None:
    output = io.StringIO()
    place = tmp_path / ("very-long-name-" * 6) / "metrics.jsonl"
    print_summary(write(tmp_path / "s.json"), {"metrics": place}, Console(file=output, width=80))
    text = output.getvalue()
    for part in ("llama-10m", "10.20M parameters", "2 (dp 2)", "-3.0000", "500.0 MiB", f"metrics: {place}\n"):
        assert part in text


ESTIMATED = EstimatedMemory(
    rank=0,
    peak_memory_bytes=5 << 20,
    parameter_bytes=4000,
    gradient_bytes=2000,
    optimizer_bytes=8000,
    step_bytes=3 << 20,
)


@pytest.mark.parametrize(
    ("device", "word", "peak"), [("cpu", " resident", ""), ("cuda:0", "", " (estimated 5.0)")]
)
def test_the_estimate_stands_beside_what_was_measured(
    tmp_path: Path, device: str, word: str, peak: str
) -> None:
    ranks = [replace(memory(0), step_bytes=4 << 20), memory(1)]
    summary = write(tmp_path / "s.json", ranks=ranks, estimate=[ESTIMATED], device=device)
    assert summary["estimate"][0] == json.loads((tmp_path / "s.json").read_text())["estimate"][0]
    rows = dict(_rows(summary))
    assert rows["optimizer state (max over ranks)"] == "0.0 MiB (estimated 0.0)"
    assert rows["increase during a step (max over ranks)"] == f"4.0 MiB{word} (estimated 3.0)"
    assert rows["peak memory (max over ranks)"] == f"300.0 MiB{peak}"


def test_a_run_that_cannot_be_estimated_says_why(tmp_path: Path) -> None:
    summary = write(tmp_path / "s.json", estimate="ConfigError: no such model")
    assert summary["estimate"] == "ConfigError: no such model"
    assert dict(_rows(summary))["gradients (max over ranks)"] == "0.0 MiB"
    assert "increase during a step (max over ranks)" not in dict(_rows(summary))  # no third step
