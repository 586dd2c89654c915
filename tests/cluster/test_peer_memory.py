"""`checkpoint.peer_memory`: after a restart a recipe resumes from the memory of its nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest

from tests.cluster.launching import launching, wait_for
from tests.cluster.node_kills import EVERY, kill, prepare, resumed, steps_made
from tests.cluster.test_training import losses
from tests.cluster.testbed import Hosts, thorough
from tests.cluster.testbed import wait_for as wait_until

STEPS = 40


@pytest.mark.key("checkpoint.peer_memory", "checkpoint.peer_memory.every")
def test_a_run_goes_on_from_memory(tmp_path: Path) -> None:
    run = (*prepare(tmp_path), "--max-steps", str(STEPS), "--output-dir", "out")
    with launching("--num_gpus", "2", "--max_restarts", "1", *run, cwd=tmp_path) as process:
        wait_for(tmp_path / "out" / "metrics.jsonl")
        wait_until(lambda: steps_made(tmp_path) > 2 * EVERY, "steps")
        before = losses(tmp_path / "out")
        status = json.loads((tmp_path / "out" / "logs" / "status.json").read_text())
        rank = psutil.Process(status["ranks"][1]["pid"])
        memory = Path(rank.environ()["LAUNCHER_MEMORY"])
        assert memory.is_dir()
        rank.kill()
        out, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    (found,) = re.findall(r"resumed from the memory of the nodes at step (\d+)", out)
    assert int(found) >= EVERY and int(found) % EVERY == 0
    assert "in the memory of the only node" in out
    again = losses(tmp_path / "out")
    assert len(again) == STEPS and again[: len(before)] == before  # steps that are made again are the same
    assert not memory.exists()  # the agent has given it back


@thorough
def test_the_memory_of_a_killed_node_is_on_the_next_one(hosts: Hosts, tmp_path: Path) -> None:
    arguments = (*prepare(tmp_path, save_every=200), "--max-steps", "1000000", "--output-dir", "out")
    hostfile = ("--hostfile", hosts.hostfile(tmp_path, slots=1), "--max_restarts", "3")
    process = hosts.start(tmp_path, *hostfile, *arguments)
    try:
        for goal, names in (25, ["node1"]), (50, ["node2"]):
            wait_until(lambda goal=goal: steps_made(tmp_path) > goal, "steps", 90)  # type: ignore[misc]
            _, before, place, step = kill(hosts, tmp_path, process, names)
            assert place == "the memory of the nodes" and before - step <= 2 * EVERY
        wait_until((tmp_path / "out/checkpoints/latest").exists, "a checkpoint on the disk", 150)
        *_, place, step = kill(hosts, tmp_path, process, ["node1", "node2"])
        assert place.endswith(f"global_step{step}") and step % 200 == 0
        assert len(resumed(tmp_path)) == 3
    finally:
        process.kill()
        process.communicate()
