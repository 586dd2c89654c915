"""After any fault on two machines, the run ends soon, reports the cause, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.testbed import Ended, Hosts, ended, thorough, wait_for

# Every rank has a child in a session of its own, and waits. That of rank 1 ignores SIGTERM where a test wants it.
BEGINS = """
import os, pathlib, subprocess, sys, time
rank = os.environ["RANK"]
"""
CHILD = """
stubborn = rank == "1" and pathlib.Path("stubborn").exists()
child = subprocess.Popen(["sh", "-c", ("trap '' TERM; " if stubborn else "") + "echo; sleep 99"],
    start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
"""
WAITS = """
print(f"rank {rank} waits", flush=True)
pathlib.Path(f"ready{rank}.tmp").write_text(str(os.getpid()))
pathlib.Path(f"ready{rank}.tmp").rename(f"ready{rank}")
order = pathlib.Path(f"fail{rank}")
while not (order.exists() and order.read_text()):  # a file is there before its text is
    time.sleep(0.05)
exec(order.read_text())
"""
WAITING = BEGINS + CHILD + WAITS
QUICK = ("--node_timeout", "3")


@contextmanager
def running(
    hosts: Hosts, cwd: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a run of two ranks on each machine, all of which wait."""
    (cwd / "script.py").write_text(WAITING)
    flags = ("--device", "cpu", "--hostfile", hosts.hostfile(cwd), *flags)
    process = hosts.start(cwd, *flags, "script.py", "--output-dir", "out", env=env)
    try:
        ready = [cwd / f"ready{rank}" for rank in range(4)]
        wait_for(lambda: process.poll() is not None or all(p.exists() for p in ready), "the ranks")
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def fault(hosts: Hosts, cwd: Path, process: subprocess.Popen[str], *verb: str) -> Ended:
    since = time.monotonic()
    hosts(*verb)
    return ended(process, since, limit_s=30)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        pytest.param("raise ValueError('bad batch')", 1, "ValueError: bad batch", marks=pytest.mark.full),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
    ids=["raises", "killed"],
)
def test_a_failed_rank_ends_all(hosts: Hosts, tmp_path: Path, text: str, code: int, said: str) -> None:
    (tmp_path / "stubborn").touch()
    with running(hosts, tmp_path) as process:
        since = time.monotonic()
        (tmp_path / "fail3").write_text(text)
        end = ended(process, since, limit_s=30)
        assert hosts.left("node1") == hosts.left("node2") == hosts.left("head") == []
    assert end.code == code and end.took_s < 10
    assert said in end.errors and "rank 3 (node2, local rank 1, pid " in end.errors
    assert f"node2:{tmp_path}/out/logs/rank3.log" in end.errors


@pytest.mark.parametrize("verb", ["cut", pytest.param("freeze", marks=thorough)])
def test_a_node_that_says_nothing_ends_all(hosts: Hosts, tmp_path: Path, verb: str) -> None:
    with running(hosts, tmp_path, *QUICK) as process:
        end = fault(hosts, tmp_path, process, verb, "node2")
        assert hosts.left("node1") == []
        if verb == "freeze":
            hosts("heal", "node2")
        assert hosts.wait_until_empty("node2", limit_s=8) == []
    assert end.code == 1 and end.took_s < 11
    assert "node2 was lost: no heartbeat for 3 s" in end.errors
    assert "could not clean up node2" in end.errors


@thorough
def test_a_node_whose_processes_are_killed(hosts: Hosts, tmp_path: Path) -> None:
    with running(hosts, tmp_path) as process:
        end = fault(hosts, tmp_path, process, "kill", "node2")
        assert hosts.left("node1") == []
    assert end.code == 1 and end.took_s < 10 and "node2 was lost: ssh ended with 255" in end.errors


@thorough
def test_a_killed_agent_leaves_nothing(hosts: Hosts, tmp_path: Path) -> None:
    with running(hosts, tmp_path) as process:
        since = time.monotonic()
        # The ranks' parent is the agent.
        hosts("exec", "node2", "--", "sh", "-c", f"kill -9 $(ps -o ppid= -p $(cat {tmp_path}/ready2))")
        end = ended(process, since, limit_s=30)
        assert hosts.left("node1") == hosts.wait_until_empty("node2", limit_s=3) == []
    assert end.code == 1 and end.took_s < 10 and "node2 was lost: " in end.errors


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=thorough)])
def test_a_signal_ends_all(hosts: Hosts, tmp_path: Path, number: signal.Signals) -> None:
    with running(hosts, tmp_path) as process:
        since = time.monotonic()
        process.send_signal(number)
        end = ended(process, since, limit_s=30)
        assert hosts.left("node1") == hosts.left("node2") == hosts.left("head") == []
    assert end.code == 128 + number and end.took_s < 10 and f"stopped by {number.name}" in end.errors


@thorough
@pytest.mark.parametrize(("times", "limit_s"), [(1, 10), (2, 5)])
def test_ctrl_c_while_a_node_is_cut_off(hosts: Hosts, tmp_path: Path, times: int, limit_s: float) -> None:
    with running(hosts, tmp_path) as process:
        pids = ", ".join((tmp_path / f"ready{rank}").read_text() for rank in (2, 3))
        hosts("cut", "node2")
        since = time.monotonic()
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        end = ended(process, since, limit_s=30)
        assert hosts.left("node1") == []
    assert end.code == 130 and end.took_s < limit_s
    assert f"could not clean up node2 (processes {pids})" in end.errors


def test_nothing_outlives_a_killed_front_end(hosts: Hosts, tmp_path: Path) -> None:
    with running(hosts, tmp_path):
        hosts("exec", "head", "--", "pkill", "-9", "-f", "launcher.cli.main")
        for name in ("head", "node1", "node2"):
            assert hosts.wait_until_empty(name, limit_s=10) == []


@thorough
def test_a_front_end_that_is_cut_off(hosts: Hosts, tmp_path: Path) -> None:
    with running(hosts, tmp_path, *QUICK) as process:
        end = fault(hosts, tmp_path, process, "cut", "head")
        for name in ("node1", "node2"):
            assert hosts.wait_until_empty(name, limit_s=8) == []
    assert end.code == 1 and "was lost" in end.errors


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (("refuse", "node2"), "Connection refused"),
        pytest.param(("cut", "node2"), "Connection timed out (no answer", marks=thorough),
        (("hide", "node2", "{cwd}/needed"), "{cwd}/needed/script.py does not exist"),
    ],
    ids=["refused", "cut", "no script"],
)
def test_a_node_that_is_not_there_at_the_start(
    hosts: Hosts, tmp_path: Path, verb: tuple[str, ...], said: str
) -> None:
    cwd = tmp_path / "needed"
    cwd.mkdir()
    (cwd / "script.py").write_text("open('started', 'w')\n")
    hosts(*(word.format(cwd=tmp_path) for word in verb))
    end = hosts.launch(cwd, "--hostfile", hosts.hostfile(tmp_path), "script.py")
    assert end.code == 2 and end.took_s < 12
    assert "1 of 2 hosts is not ready, and nothing was started" in end.errors
    assert "node2  " in end.errors and said.format(cwd=tmp_path) in end.errors
    assert not (cwd / "started").exists() and hosts.left("node1") == hosts.left("node2") == []


def test_a_firewall_between_two_nodes(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("open('started', 'w')\n")
    hosts("cut", "node2", "node1")  # the front end reaches both
    flags = ("--hostfile", hosts.hostfile(tmp_path), "--master_port", "29500")
    end = hosts.launch(tmp_path, *flags, "script.py")
    assert end.code == 2 and end.took_s < 12
    assert "2 of 2 hosts are not ready, and nothing was started" in end.errors
    assert "\n  node1  cannot reach node2:" in end.errors
    assert "\n  node2  cannot reach node1:29500: no answer within 3 s (is there a firewall?" in end.errors
    assert not (tmp_path / "started").exists() and not (tmp_path / "runs").exists()


@thorough
def test_a_name_that_nobody_knows(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    end = hosts.launch(tmp_path, "--hostfile", hosts.hostfile(tmp_path, more="nodex slots=1\n"), "script.py")
    assert end.code == 2 and end.took_s < 10
    assert "1 of 3 hosts is not ready" in end.errors and "unknown host name: check the hostfile" in end.errors
