"""The GPU checks, run on CPUs: ranks connect, runs are estimated, and the report lists failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import memory, ranks, report

PARITY = """
tests/zero/test_parity.py::test_matrix[a b]
[gw0] [ 10%] PASSED tests/zero/test_parity.py::test_matrix[a b]
[gw1] [ 20%] FAILED tests/zero/test_leaf.py::test_one
[gw1] [ 20%] SKIPPED tests/zero/test_leaf.py::test_other (no reason)
FAILED tests/zero/test_leaf.py::test_one - AssertionError: so it goes
[gw0] [ 30%] ERROR tests/zero/test_keys.py::test_three
"""
MEMORY = [
    {
        "mode": "stage 0",
        "ranks": 1,
        "found": [{"peak": 100, "between": 50, "card": 300, "estimated": 103, "estimated_between": 50}],
    },
    {"mode": "stage 3", "ranks": 2, "failed": "Traceback\nRuntimeError: out of memory"},
]
SPEED = {
    "row": "ours", "shape": "1B", "seconds": 0.5, "spread": 0.01, "tokens_per_s": 9.0, "tflops": 494.5, "loss": 2.0,
}  # fmt: skip


def test_the_report_has_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "parity.log").write_text(PARITY)
    (tmp_path / "memory.log").write_text(
        "a warning\n" + "\n".join(map(json.dumps, MEMORY)) + '\n{"mode": "cut'
    )
    (tmp_path / "speed.log").write_text(json.dumps(SPEED))
    assert report.write(tmp_path, {"ranks": 0, "parity": 1, "memory": 124}) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["parity"] == {
        "counts": {"PASSED": 1, "FAILED": 1, "SKIPPED": 1, "ERROR": 1},
        "failed": ["tests/zero/test_keys.py::test_three", "tests/zero/test_leaf.py::test_one"],
    }
    text = (tmp_path / "report.md").read_text()
    assert "| stage 0 | 1 | 0 | 0 | +3.0% | +0.0% | 0 |" in text
    assert "| stage 3 | 2 | RuntimeError: out of memory |" in text
    assert "| ours | 1B | 0.500 | 0.010 | 9 | 494.5 |" in text


def test_two_ranks_reach_each_other() -> None:
    assert ranks.run("benchmarks.gpu.ranks", [], 2) == ["gloo"] * 2


def test_a_rank_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="No module named"):
        ranks.run("benchmarks.gpu.nowhere", [])


def test_a_run_is_estimated() -> None:
    mode = next(mode for mode in memory.MODES if mode.name == "stage 2, optimizer on the host")
    (found,) = memory.row(mode)["found"]
    assert found["estimated"] > found["estimated_between"] > 0 and found["loss"] > 0


@pytest.mark.full
def test_a_row_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.speed", "ours, stage 3"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[0])
    assert found["seconds"] > 0 and found["tokens_per_s"] > 0
