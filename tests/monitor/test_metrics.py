"""`metrics.jsonl`: lines are written atomically, and a resumed run duplicates no step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.monitor.metrics import MetricsWriter, is_number, read_metrics

FIELDS = {"grad_norm": 0.5, "lr": 1e-3, "tokens": 1024, "tokens_per_s": 100.0, "step_time_s": 0.1}


def fill(path: Path, steps: range, loss: float = 1.0, **options: Any) -> None:
    with MetricsWriter(path, **options) as writer:
        for step in steps:
            writer.write(step, loss, **FIELDS)


def test_a_line_has_the_promised_keys_and_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        returned = writer.write(1, 2.5, **FIELDS, eval_loss=2.25, loss_scale=65536.0)
        (line,) = path.read_text().splitlines()  # not closed yet
    record = json.loads(line)
    assert record == returned == {"step": 1, "loss": 2.5, **FIELDS, "eval_loss": 2.25, "loss_scale": 65536.0}
    assert list(record)[:7] == ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s"]
    assert read_metrics(path) == [record]


def test_resume_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 11))
    fill(path, range(7, 9), loss=2.0, resume_step=6)
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(i, 1.0) for i in range(1, 7)] + [
        (7, 2.0),
        (8, 2.0),
    ]


def test_a_torn_last_line_is_left_out_and_removed_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 4))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    fill(path, range(4, 5), resume_step=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        read_metrics(path)


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 4))
    fill(path, range(1, 2), loss=3.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 3.0)]


def test_resume_without_a_file(tmp_path: Path) -> None:
    fill(tmp_path / "metrics.jsonl", range(6, 7), resume_step=5)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [6]


def test_a_loss_that_is_no_number_can_be_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 2), loss=float("nan"))
    (record,) = read_metrics(path)
    assert not is_number(record["loss"]) and is_number(record["lr"])
    assert not is_number(None) and not is_number(True) and not is_number(float("inf"))
