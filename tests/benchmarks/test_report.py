"""The benchmark's table: which rows run, and the numbers computed from their records."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peers.base import Flags
from benchmarks.peers.engine import zero_config
from benchmarks.report import report, wrong_losses
from benchmarks.run_peer import PEERS
from benchmarks.suite import Suite
from benchmarks.sweep import ROOT, Row, _reason, command
from benchmarks.tensor import SUITE as TENSOR
from benchmarks.turns import in_turns, summary
from benchmarks.workload import SIZES, Text, Work
from benchmarks.zero import SUITE as ZERO


def record(row: str, turn: int, speed: float, rss: int, loss: float = 2.0) -> dict[str, Any]:
    return {
        "row": row,
        "turn": turn,
        "peer": "single" if row == "plain" else "other",
        "step_ms_median": 1000 / speed,
        "cpu_s_per_step": 2.0,
        "tokens_per_s": speed,
        "peak_rss_mb": [rss, rss - 5],
        "live_mb": [{"after_step": 100.0}, {"after_step": 90.0}],
        "losses": [3.0, loss],
        "foreign_cpu": 0.01,
    }


def write(file: Path, records: list[dict[str, Any]]) -> None:
    about = {
        "date": "today",
        "commit": "abc",
        "cpu": "a CPU",
        "cores": 2,
        "memory_gib": 8,
        "python": "3.11",
        "versions": {"torch": "2.13"},
    }
    rows = [Row("ours 1", ("g",), "ours"), Row("fast", ("g",), "ddp"), Row("plain", ("g",), "single")]
    head = {
        "session": about,
        "work": dataclasses.asdict(Work()),
        "rows": [dataclasses.asdict(r) for r in [*rows, Row("broken", ("g",), "fsdp2")]],
    }
    file.write_text("\n".join(json.dumps(line) for line in [head, *records]))


def cells(table: str, name: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.strip("| *").startswith(name))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_of_the_same_turn_and_to_the_best_peer(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    runs = [
        # The machine is half as fast in the second turn, for all.
        *(record("ours 1", turn, speed, 500, loss=2.2) for turn, speed in enumerate([150.0, 75.0, 150.0])),
        *(record("fast", turn, speed, 600) for turn, speed in enumerate([100.0, 50.0, 100.0])),
        *(record("plain", turn, speed, 400) for turn, speed in enumerate([80.0, 40.0, 80.0])),
        {"row": "broken", "turn": 0, "failed": "no"},
    ]
    write(file, runs)
    table = report(file)
    ours = cells(table, "ours 1")
    assert ours[2] == "150"
    assert ours[4] == "1.50"
    assert (ours[5], ours[6]) == ("500", "1.25")
    assert ours[7] == "100"
    assert ours[8] == "1e-01"
    assert cells(table, "fast")[4] == "1.00"
    assert cells(table, "plain")[4] == "0.80"
    assert cells(table, "broken")[1] == "failed"
    assert table.index("ours 1") < table.index("fast") < table.index("plain")
    assert "ours 1 / fast: speed 1.50, peak RSS 0.83" in table
    assert "ours 1 / plain: speed 1.88, peak RSS 1.25" in table


@pytest.mark.parametrize("loss", [2.001, float("nan")])
def test_a_row_with_other_losses_is_named(tmp_path: Path, loss: float) -> None:
    file = tmp_path / "r.jsonl"
    right = [record("plain", 0, 80.0, 400), record("fast", 0, 100.0, 600, loss=2.0001)]
    write(file, [*right, record("ours 1", 0, 150.0, 500)])
    assert not wrong_losses(file)
    assert "another job" not in report(file)
    write(file, [*right, record("ours 1", 0, 150.0, 500), record("ours 1", 1, 150.0, 500, loss=loss)])
    assert wrong_losses(file) == ["ours 1"]
    assert "more than 0.0001 from plain PyTorch's: ours 1" in report(file)


def test_only_the_last_session_of_a_file_is_reported(tmp_path: Path) -> None:
    file, older = tmp_path / "r.jsonl", tmp_path / "old.jsonl"
    write(older, [record("fast", 0, 7777.0, 1)])
    write(file, [record("fast", 0, 100.0, 1)])
    file.write_text(older.read_text() + "\n" + file.read_text())
    assert "7777" not in report(file)


SUITES = pytest.mark.parametrize("suite", [ZERO, TENSOR], ids=lambda suite: suite.name)


@SUITES
def test_every_row_is_a_run_that_exists(suite: Suite) -> None:
    names = {field.name for field in dataclasses.fields(Flags)}
    for row in suite.ours + suite.peers + suite.tuned:
        assert row.peer in PEERS
        assert set(row.flags) <= names
        assert set(row.groups) <= set(suite.groups)


def test_runs_that_others_disturbed_do_not_count_where_there_are_others(tmp_path: Path) -> None:
    disturbed = {"foreign_cpu": 0.4}
    runs = [record("ours 1", 0, 100, 50), record("ours 1", 1, 10, 50) | disturbed]
    write(tmp_path / "r", [*runs, record("plain", 0, 100, 60), record("fast", 0, 20, 60) | disturbed])
    table = report(tmp_path / "r")
    assert cells(table, "ours 1")[1].startswith("10 (10-10)"), "the quiet turn alone"
    assert cells(table, "fast")[1].startswith("50 "), "there is no other"


def test_losses_of_disturbed_runs_count(tmp_path: Path) -> None:
    wrong = record("ours 1", 1, 10, 50, loss=9.0) | {"foreign_cpu": 0.4}
    write(tmp_path / "r", [record("ours 1", 0, 100, 50), wrong, record("plain", 0, 100, 60)])
    assert wrong_losses(tmp_path / "r") == ["ours 1"]


def test_a_failure_is_kept_without_places_of_the_machine() -> None:
    output = f'File "{ROOT}/x.py"\nOSError: {ROOT}/y is missing\nChildFailedError: \n'
    assert _reason(output) == "OSError: .../y is missing"


def test_each_group_has_ours_and_peers() -> None:
    for suite, group in [*((ZERO, group) for group in ZERO.groups), (TENSOR, "tp 2")]:
        rows = suite.choose([group], tuned=False)
        assert any(row.is_ours for row in rows)
        assert any(not row.is_ours for row in rows)
    assert all(row.groups == ("stage 2",) for row in ZERO.choose(["stage 2"], tuned=True))
    assert {row.name for row in ZERO.choose(["stage 3"], tuned=False)} == {
        "ours 3",
        "ours 3, buckets 5e6, live 1e7",
        "DeepSpeed 3",
        "FSDP2, reshard after forward",
    }


def test_a_run_is_started_with_its_flags() -> None:
    words = command(Row("x", (), "deepspeed", flags={"stage": 3, "max_live": 7}), Work(micro_batch=1))
    assert "torch.distributed.run" in words
    for flag, value in [
        ("--peer", "deepspeed"),
        ("--stage", "3"),
        ("--max-live", "7"),
        ("--micro-batch", "1"),
    ]:
        assert words[words.index(flag) + 1] == value


def test_sizes_are_what_they_say() -> None:
    assert SIZES["small"].parameters == pytest.approx(25.6e6, rel=0.01)
    assert SIZES["medium"].parameters == pytest.approx(113.7e6, rel=0.01)


def test_ranks_share_one_global_batch() -> None:
    text, work = Text(seq=16), Work(seq=16, global_batch=4, micro_batch=1)
    whole = [row.tolist() for ids in text.step(2, work, 0, 1) for row in ids]
    dealt = [row.tolist() for rank in range(2) for ids in text.step(2, work, rank, 2) for row in ids]
    assert whole == dealt
    assert len(whole) == 4


def test_the_ranks_of_a_tp_group_are_one_share_of_the_batch() -> None:
    work, flags = Work(global_batch=8, micro_batch=2), Flags(tp=2)
    config = zero_config(work, flags, world=4)
    assert config["gradient_accumulation_steps"] == 2
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert "tensor_parallel" not in zero_config(work, Flags(), world=4)


class Slept:
    """A peer whose steps take a known time."""

    def __init__(self, seconds: float, seen: list[str], name: str) -> None:
        self.seconds, self.seen, self.name = seconds, seen, name

    def forward_backward(self, micro_batches: list[Tensor]) -> Tensor:
        self.seen.append(self.name)
        time.sleep(self.seconds)
        return torch.zeros(())

    def optimizer_step(self) -> None: ...

    def extra(self) -> dict[str, str]:
        return {}


def test_steps_in_turns() -> None:
    seen: list[str] = []
    pair: list[Any] = [Slept(0.02, seen, "a"), Slept(0.01, seen, "b")]
    times = in_turns(pair, Work(steps=7, warmup=1), 0, 1)
    assert [len(one) for one in times] == [6, 6] and seen[:4] == ["b", "a", "a", "b"]
    assert summary(["a", "b"], [[20.0] * 6, [10.0] * 6]).endswith(
        "b is 2.000 times as fast as a (quartiles 2.000 2.000)"
    )
