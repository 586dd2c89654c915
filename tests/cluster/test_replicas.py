"""Replicas that train together, and continue when one of them dies (`fault_tolerance`)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.cluster.coordinator import Coordinator
from launcher.cluster.membership import Membership
from launcher.config import load
from launcher.config.fault_tolerance import check_replicas_are_started, of_replica
from launcher.errors import ConfigError
from tests.cluster.launching import ROOT, environment, launch, launching
from tests.cluster.rank_kills import joined, prepare, ranks_of, records, together
from tests.cluster.replica_steps import DIES_IN, STEPS, VICTIM, Small
from tests.cluster.testbed import wait_for

NEVER = STEPS


def truth(last_of_all: int) -> list[list[float]]:
    """Return the result of one process: three batches per step up to `last_of_all`, then those of the survivors."""
    torch.manual_seed(0)
    model = Small()
    found: list[list[float]] = []
    for step in range(STEPS):
        numbers = range(3) if step <= last_of_all else [n for n in range(3) if n != VICTIM]
        tokens = sum(1 + number for number in numbers)
        model.zero_grad()
        mean = 0.0
        for number in numbers:
            torch.manual_seed(100 * step + number)
            loss = model(torch.randn(1, 5)) * (1 + number) / tokens
            loss.backward()
            mean += float(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
        found.append([len(numbers), mean, sum(float(p.detach().double().sum()) for p in model.parameters())])
    return found


def test_wherever_a_replica_dies_the_others_make_the_same_step() -> None:
    """The step includes the victim's gradients if all have them and one has used them; otherwise it excludes them."""
    places = ("before", "between", "one", "two")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.replica_steps", *places],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for place, (first, second) in found.items():
        expected = truth(DIES_IN - 1 if place in ("before", "between") else DIES_IN)
        assert first == second, place
        for mine, wanted in zip(first, expected, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-6, abs=1e-6), place


@pytest.mark.key("fault_tolerance", "fault_tolerance.replicas")
def test_a_run_whose_ranks_are_killed(tmp_path: Path) -> None:
    """Two replicas of one rank; the leader is killed."""
    run = (*prepare(tmp_path, 2), "--save-every", "1000")
    whole = launch(
        "--num_gpus",
        "2",
        *_without_replicas(tmp_path, run),
        "--max-steps",
        "6",
        "--output-dir",
        "one",
        cwd=tmp_path,
    )
    assert whole.returncode == 0, whole.stderr
    with launching(
        "--num_gpus", "2", *run, "--max-steps", "100000", "--output-dir", "out", cwd=tmp_path
    ) as process:
        wait_for(lambda: len(records(tmp_path)) > 5, "steps", 60)
        made = len(records(tmp_path))
        os.kill(ranks_of(tmp_path, 0)[0], signal.SIGKILL)
        wait_for(lambda: joined(tmp_path) == 1, "the return", 60)
        wait_for(lambda: together(tmp_path, 2, made + 5), "steps of both", 60)
        process.terminate()
        out, errors = process.communicate(timeout=60)
    found = records(tmp_path)
    assert [record["step"] for record in found] == list(
        range(1, len(found) + 1)
    )  # no step twice, and none lost
    assert {record["replicas"] for record in found} == {1, 2}
    for mine, wanted in zip(found[:5], records(tmp_path, "one"), strict=False):
        assert mine["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert "launch: replica 1 trains alone" in out and "launch: replicas 0, 1 of 2 train together" in out
    assert process.returncode == 143, (out, errors)


def _without_replicas(directory: Path, run: tuple[str, ...]) -> list[str]:
    config = json.loads((directory / "ds.json").read_text())
    del config["fault_tolerance"]
    (directory / "plain.json").write_text(json.dumps(config))
    return [{"ds.json": "plain.json"}.get(word, word) for word in run]


@pytest.mark.full
@pytest.mark.key("fault_tolerance.timeout_s")
def test_a_frozen_replica_is_left_behind(tmp_path: Path) -> None:
    run = prepare(tmp_path, 2, fault_tolerance={"replicas": 2, "timeout_s": 2})
    with launching(
        "--num_gpus", "2", *run, "--max-steps", "100000", "--output-dir", "out", cwd=tmp_path
    ) as process:
        wait_for(lambda: len(records(tmp_path)) > 3, "steps", 60)
        (frozen,) = ranks_of(tmp_path, 1)
        os.kill(frozen, signal.SIGSTOP)
        wait_for(
            lambda: bool(records(tmp_path)) and records(tmp_path)[-1]["replicas"] == 1, "steps of one", 30
        )
        os.kill(frozen, signal.SIGCONT)
        wait_for(lambda: joined(tmp_path) == 1, "the return", 60)
        process.kill()
        process.communicate()
    assert (
        "the other replicas have continued without replica 1: it was silent"
        in (tmp_path / "out/logs/replica1/rank0.log").read_text()
    )


def test_a_stranger_is_not_heard() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    membership = Membership(2, 1)
    coordinator = Coordinator(server, "secret of the run", membership)
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(300),
        b"0" * 32 + b"\n" + b"0.0.9 " + b"0" * 64 + b"\n",
    ):
        with socket.create_connection(server.getsockname()) as stranger:
            stranger.sendall(said)
    time.sleep(0.3)
    coordinator.close()
    assert all(replica.attempt == -1 and not replica.present for replica in membership.replicas)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (("--num_gpus", "3"), "3 ranks cannot be divided into 2 replicas"),
        ((), "the total number of ranks is unknown"),
        (("--num_gpus", "2", "--min_nodes", "1"), "--on_straggler cannot be combined with replicas"),
        (("--num_gpus", "2", "--launcher", "slurm"), "over ssh or pdsh"),
    ],
)
def test_what_does_not_go_with_replicas(tmp_path: Path, argv: tuple[str, ...], what: str) -> None:
    run = prepare(tmp_path, 2)
    done = launch(*argv, *run, cwd=tmp_path)
    assert done.returncode == 2 and what in done.stderr and "fault_tolerance.replicas" in done.stderr


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"checkpoint": {"peer_memory": {"every": 5}}}, "replicas already hold each other's state"),
        ({"train_batch_size": 3}, "train_batch_size 3 is not a multiple of fault_tolerance.replicas 2"),
        (
            {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1]}},
            "elasticity changes",
        ),
    ],
)
def test_keys_that_do_not_go_with_replicas(section: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        of_replica(load({"train_micro_batch_size_per_gpu": 1, "fault_tolerance": {"replicas": 2}, **section}))


def test_a_script_is_no_replica() -> None:
    config = {"train_batch_size": 2, "fault_tolerance": {"replicas": 2}}
    with pytest.raises(ConfigError, match=r"fault_tolerance\.replicas needs a recipe started with `launch`"):
        check_replicas_are_started(load(config))


def test_the_rehearsal_shows_the_ranks_of_one_replica(tmp_path: Path) -> None:
    done = launch("--num_gpus", "4", "--dry_run", *prepare(tmp_path, 2), cwd=tmp_path)
    assert done.returncode == 0 and len(re.findall(r"WORLD_SIZE=2", done.stdout)) >= 1, (
        done.stdout + done.stderr
    )


@pytest.mark.full
def test_a_replica_that_starts_while_the_run_is_stopped_saves_nothing(tmp_path: Path) -> None:
    run = (*prepare(tmp_path, 2, checkpoint={"keep_last": 1}), "--max-steps", "100000", "--output-dir", "out")
    with launching("--num_gpus", "2", "--term_grace", "40", *run, cwd=tmp_path) as process:
        wait_for(lambda: len(records(tmp_path)) > 5, "steps", 60)
        os.kill(ranks_of(tmp_path, 1)[0], signal.SIGKILL)
        log = tmp_path / "out/logs/replica1/rank0.log"
        wait_for(
            lambda: log.read_text().count("output  ") == 2, "its second start", 60
        )  # it has not joined yet
        process.terminate()
        out, errors = process.communicate(timeout=90)
    assert process.returncode == 143, (out, errors)
    made = len(records(tmp_path))
    assert (tmp_path / "out/checkpoints/latest").read_text().strip() == f"global_step{made}" and made > 5
