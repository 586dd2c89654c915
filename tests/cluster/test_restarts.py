"""`--max_restarts`: a failed run is restarted on all nodes, with a single attempt count."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.cluster.launching import launch
from tests.cluster.test_faults import running
from tests.cluster.testbed import Hosts, ended, thorough

FAILS_TWICE = """
import os, pathlib, sys, time
rank, last, attempt = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1, os.environ["LAUNCHER_ATTEMPT"]
print("attempt", attempt, "port", os.environ["MASTER_PORT"], flush=True)
pathlib.Path(f"seen{rank}-{attempt}").touch()
if rank == last:
    while not all(pathlib.Path(f"seen{other}-{attempt}").exists() for other in range(last)):
        time.sleep(0.05)
    sys.exit(9 if int(attempt) < 2 else 0)
"""


def test_every_crash_costs_one_restart(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS_TWICE)
    flags = ("--hostfile", hosts.hostfile(tmp_path), "--device", "cpu", "--max_restarts", "2")
    end = hosts.launch(tmp_path, *flags, "script.py", "--output-dir", "out")
    assert end.code == 0, end.errors
    assert end.out.count("restart 1 of 2") == end.out.count("restart 2 of 2") == 1
    assert "rank 3 (node2, local rank 1" in end.out
    for rank in (0, 3):  # all ranks of all nodes know the same attempt; earlier output stays
        lines = (tmp_path / f"out/logs/rank{rank}.log").read_text().splitlines()
        assert [line.split()[1] for line in lines] == ["0", "1", "2"]


@thorough
def test_a_node_that_comes_back_is_used_again(hosts: Hosts, tmp_path: Path) -> None:
    cache = {"LAUNCHER_CACHE": str(tmp_path / "cache")}
    with running(hosts, tmp_path, "--max_restarts", "1", "--sync", env=cache) as process:
        for rank in range(4):
            (tmp_path / f"fail{rank}").write_text("if os.environ['LAUNCHER_ATTEMPT'] == '0': time.sleep(99)")
            (tmp_path / f"ready{rank}").unlink()
        since = time.monotonic()
        hosts("kill", "node2")
        hosts("heal", "node2")  # its sshd is there again
        end = ended(process, since, limit_s=30)
    assert end.code == 0 and end.took_s < 20, end.errors
    assert "node2 was lost" in end.out and "restart 1 of 1" in end.out
    # They share a cache here: what one has got first, the other need not be sent.
    assert re.search(r" \d+ bytes to node[12]", end.out) and "sent nothing to node2\n" in end.out


def test_no_restart_is_left(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS_TWICE)
    done = launch("--num_gpus", "2", "--max_restarts", "1", "script.py", "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 9 and "rank 1 (pid" in done.stderr
    assert "restart 1 of 1" in done.stdout


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from launcher.errors import ConfigError\nraise ConfigError('no')\n")
    done = launch("--max_restarts", "3", "script.py", cwd=tmp_path)
    assert done.returncode == 2 and "restart" not in done.stdout


def test_a_restart_goes_on_without_a_node_that_is_gone(hosts: Hosts, tmp_path: Path) -> None:
    with running(hosts, tmp_path, "--max_restarts", "1", "--min_elastic_nodes", "1") as process:
        for rank in range(4):
            (tmp_path / f"fail{rank}").write_text(
                "if os.environ['LAUNCHER_ATTEMPT'] == '0': time.sleep(99)\n"
                "print('world', os.environ['WORLD_SIZE'], flush=True)"
            )
        since = time.monotonic()
        hosts("kill", "node1")  # the first node: rank 0 is elsewhere then
        end = ended(process, since, limit_s=30)
    assert end.code == 0, end.errors
    assert "continuing without node1" in end.out and "2 ranks on cpu" in end.out and "world 2\n" in end.out
