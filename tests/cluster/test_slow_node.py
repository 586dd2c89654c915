"""A slow node is reported, and excluded by a restart if the user wants it. The nodes are plain processes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster.run_status import LONG
from launcher.top.run_view import find_status, read_run
from tests.cluster.launching import wait_for
from tests.cluster.test_elastic import free_port, node

# Steps as a rank counts them; those of node1 take half as long again.
SCRIPT = """
import os, pathlib, time
from launcher.monitor import flight_recorder
from launcher.monitor.flight_recorder import StepCounters
rank, attempt, own = int(os.environ["RANK"]), os.environ["LAUNCHER_ATTEMPT"], 1.5 if os.environ["SLOW"] == "1" else 1.0
pathlib.Path(f"world{attempt}-{rank}").write_text(os.environ["CROSS_SIZE"])
recorder, end = flight_recorder.mine(), pathlib.Path("end")
for step in range(1, 100_000):
    recorder.count(StepCounters(steps=step, counted=step, total=step, samples=step, forward=step * own))
    time.sleep(0.02)
    if end.exists():
        break
"""


def run(directory: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[Any]:
    (directory / "script.py").write_text(SCRIPT)
    (directory / "ds.json").write_text("{}")
    port, nodes = free_port(), []
    for rank in range(3):
        monkeypatch.setenv("SLOW", "1" if rank == 1 else "0")
        nodes.append(stack.enter_context(node(rank, port, directory, *flags)))
    return nodes


def test_a_run_goes_on_without_a_slow_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--min_nodes", "2", "--max_restarts", "1", "--on_straggler", "restart-without")
    with ExitStack() as stack:
        first, *_ = run(tmp_path, stack, monkeypatch, *flags)
        assert wait_for(tmp_path / "world0-1") == "3"
        assert wait_for(tmp_path / "world1-1") == "2"
        (tmp_path / "end").touch()
        said, errors = first.communicate(timeout=60)
        assert first.returncode == 0, errors
    assert "node1 rank 1 is slow: forward 1.50 times the median of the other ranks for " in said
    assert "continuing without node1" in said and "restart 1 of 1" in said
    status = json.loads((tmp_path / "out" / "logs" / "status.json").read_text())
    assert status["state"] == "completed" and status["restarts"] == 1
    assert [rank["host"] for rank in status["ranks"]] == ["node0", "node2"]


def test_a_slow_node_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        first, *_ = run(tmp_path, stack, monkeypatch)
        wait_for(tmp_path / "world0-1")
        file = tmp_path / "out" / "logs" / "status.json"
        wait_for(file)

        def slow_for() -> int:
            slow = read_run(find_status(str(tmp_path / "out"))).ranks[1].slow
            return slow["steps"] if slow else 0

        while slow_for() < 2 * LONG:
            assert first.poll() is None
        (tmp_path / "end").touch()
        said, _errors = first.communicate(timeout=60)
        assert first.returncode == 0 and said.count("is slow: forward") == 1
