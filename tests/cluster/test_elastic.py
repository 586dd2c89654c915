"""A run continues with fewer nodes, and with more again; the nodes are plain processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from launcher.cli.job import Job
from launcher.cli.launch_flags import launch_parser
from launcher.cli.request import RunRequest
from launcher.cli.shares import allowed
from launcher.cluster.attempt import EndPolicy
from launcher.cluster.frontend import FrontEnd
from launcher.cluster.hostfile import Host
from launcher.cluster.node import Node
from launcher.cluster.node_group import NodeGroup, NodeTimeouts
from launcher.cluster.rendezvous import RendezvousOptions
from launcher.config import load
from launcher.errors import ConfigError
from tests.cluster.launching import launch, launching, wait_for

# Each rank says how many there are, and waits for what to do in this attempt.
SCRIPT = """
import os, pathlib, sys, time
rank, attempt = os.environ["RANK"], os.environ["LAUNCHER_ATTEMPT"]
pathlib.Path(f"world{attempt}-{rank}").write_text(os.environ["WORLD_SIZE"] + " of " + os.environ["CROSS_SIZE"])
order = pathlib.Path(f"order{attempt}")
while not (order.exists() and order.read_text()):
    time.sleep(0.02)
sys.exit(9 if order.read_text() == "fail" and rank == "0" else 0)
"""
SECTION = {"enabled": True, "max_train_batch_size": 3, "micro_batch_sizes": [1, 3]}  # on 1 or 3 ranks


def write(directory: Path, section: dict[str, object] = SECTION) -> None:
    (directory / "script.py").write_text(SCRIPT)
    (directory / "ds.json").write_text(json.dumps({"elasticity": section}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def node(rank: int, port: int, cwd: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    place = ("--master_addr", "127.0.0.1", "--master_port", str(port), "--node_rank", str(rank))
    more = (
        "--no_ssh",
        "--insecure",
        "--num_nodes",
        "3",
        "--device",
        "cpu",
        "--node_timeout",
        "3",
        "--config",
        "ds.json",
    )
    with launching(*more, *place, *flags, "script.py", "--output-dir", "out", cwd=cwd) as process:
        yield process


def told(process: subprocess.Popen[str], what: str) -> str:
    """Return the output until it contains `what`."""
    assert process.stdout is not None
    said = ""
    while what not in said:
        said += (line := process.stdout.readline())
        assert line, said
    return said


def test_fewer_nodes_then_more_again(tmp_path: Path) -> None:
    write(tmp_path)
    port, flags = free_port(), ("--min_nodes", "1", "--max_restarts", "2")
    with ExitStack() as stack:
        first = stack.enter_context(node(0, port, tmp_path, *flags))
        others = [stack.enter_context(node(rank, port, tmp_path, *flags)) for rank in (1, 2)]
        assert [wait_for(tmp_path / f"world0-{rank}") for rank in range(3)] == ["3 of 3"] * 3
        os.kill(others[1].pid, signal.SIGKILL)
        # 2 ranks are left, and 2 is not allowed.
        assert wait_for(tmp_path / "world1-0") == "1 of 1"
        said = ""
        for _ in range(2):  # it may also go and come back while it waits
            back = stack.enter_context(node(2, port, tmp_path, *flags))
            said += told(first, "node2 is available; the next restart can use it")
            if said.count("node2 is available") == 1:
                os.kill(back.pid, signal.SIGKILL)
        (tmp_path / "order1").write_text("fail")
        assert [wait_for(tmp_path / f"world2-{rank}") for rank in range(3)] == ["3 of 3"] * 3
        (tmp_path / "order2").write_text("end")
        rest, errors = first.communicate(timeout=60)
        assert first.returncode == 0, errors
        assert others[0].wait(timeout=10) == back.wait(timeout=10) == 0
    said += rest
    for line in ("node2 was lost", "continuing without node2", "elasticity: only 1 of 2 ranks are used"):
        assert line in said
    assert "continuing with node2" in said and "restart 2 of 2" in said


def test_nodes_that_are_left_out_stay_so_while_the_others_are_the_same() -> None:
    nodes = [Node(Host(name, (0,)), index, []) for index, name in enumerate("abc")]
    node_group = NodeGroup(nodes, NodeTimeouts())
    front_end = FrontEnd(
        node_group,
        *[lambda *_: None] * 3,
        meeting=RendezvousOptions(),
        min_nodes=1,
        max_nodes=2,
        policy=EndPolicy(),
    )  # type: ignore[arg-type]
    for node in nodes:
        node.facts = {}
    assert front_end._choose() and node_group.nodes == nodes[:2]  # the third is in reserve
    node_group.nodes = nodes[:1]
    assert not front_end._choose() and node_group.nodes == nodes[:1]
    nodes[0].lost = "gone"
    assert front_end._choose() and node_group.nodes == nodes[1:]


def test_a_number_of_ranks_that_is_not_allowed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write(tmp_path)
    done = launch("--num_gpus", "2", "--device", "cpu", "--config", "ds.json", "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 ranks are not allowed; allowed numbers: 1, 3" in done.stderr
    assert "ds.json:1" in done.stderr and "start 1 or 3 ranks" in done.stderr
    assert not list(tmp_path.glob("world*"))


def test_which_slots_a_restart_uses(tmp_path: Path) -> None:
    write(tmp_path, SECTION | {"min_gpus": 2})  # on 3 ranks only
    job = job_of(tmp_path, "--num_gpus", "3")
    hosts = [Host("a", (4, 5)), Host("b", (0, 1, 2))]
    assert allowed(job, hosts, is_restart=True) == [Host("a", (4, 5)), Host("b", (0,))]
    for few, is_restart in ((hosts, False), (hosts[:1], True)):
        with pytest.raises(ConfigError, match="allowed numbers: 3"):
            allowed(job, few, is_restart=is_restart)


def job_of(directory: Path, *argv: str) -> Job:
    flags = launch_parser().parse_args([*argv, "--no_python"])
    return Job(RunRequest(flags, ["true"]), flags, load(str(directory / "ds.json")), None)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--min_nodes", "2"], "--min_nodes 2: the number of hosts is 1"),
        (["--max_elastic_nodes", "2"], "--max_nodes 2: the number of hosts is 1"),
    ],
)
def test_bounds_beyond_the_hosts(tmp_path: Path, argv: list[str], said: str) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=said):
        job_of(tmp_path, *argv)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ([], (2, 2, 0)),
        (["--max_nodes", "1"], (1, 1, 0)),
        (["--elastic_training"], (1, 2, 100)),
        (["--elastic_training", "--min_nodes", "2", "--max_restarts", "3"], (2, 2, 3)),
    ],
)
def test_how_many_nodes_and_restarts(tmp_path: Path, argv: list[str], found: tuple[int, ...]) -> None:
    write(tmp_path)
    place = ("--no_ssh", "--insecure", "--num_nodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1")
    front_end = job_of(tmp_path, *place, "--master_port", str(free_port()), *argv).front_end()
    assert (front_end.min_nodes, front_end.max_nodes, front_end.max_restarts) == found
