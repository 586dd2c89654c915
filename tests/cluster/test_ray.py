"""A real Ray cluster of three raylets on simulated machines: nodes come from a placement group, without ssh.

Requires Ray: `pip install -e ".[ray]"`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_faults import WAITING
from tests.cluster.testbed import SCRIPT, Hosts, ended, thorough, wait_for

pytestmark = [
    thorough,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed here"),
]
NODES, SLOTS = 3, 2
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--block"]
RAY += ["--object-store-memory", "80000000"]
LAUNCH = ("--launcher", "ray", "--device", "cpu", "--num_gpus", str(SLOTS))


def start_ray(hosts: Hosts, name: str, *flags: str) -> None:
    """Start a raylet on a machine; it ends with the machine."""
    subprocess.Popen(
        [sys.executable, str(SCRIPT), "exec", name, "--", *RAY, *flags],
        env=hosts.env,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
        start_new_session=True,
    )


def free(hosts: Hosts) -> float:
    """Return the unallocated cores of the cluster."""
    code = "import ray; ray.init('auto', log_to_driver=False); print('free', ray.available_resources().get('CPU', 0))"
    command = [sys.executable, str(SCRIPT), "exec", "head", "--", sys.executable, "-c", code]
    told = subprocess.run(command, env=hosts.env, capture_output=True, text=True, timeout=60).stdout
    return float(told.rpartition("free ")[2] or -1)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("ray"))
    hosts("up", NODES)
    address = dict(line.split()[:2] for line in hosts("list").splitlines())["head"] + ":6379"
    try:
        start_ray(hosts, "head", "--head", "--num-cpus", "0", "--include-dashboard", "false")
        wait_for(lambda: free(hosts) == 0, "the head of the Ray cluster")
        for node in range(1, NODES + 1):  # one by one: they make files in one directory
            start_ray(hosts, f"node{node}", "--address", address, "--num-cpus", str(SLOTS))
            wait_for(lambda node=node: free(hosts) == SLOTS * node, f"the raylet of node{node}")  # type: ignore[misc]
        yield hosts
    finally:
        hosts("down")


def ranks(hosts: Hosts, name: str) -> list[str]:
    return [line for line in hosts.left(name) if "launcher/cluster" in line or "zlib.decompress" in line]


def test_ranks_run_on_the_nodes_that_ray_gives(ray: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, socket; print(socket.gethostname(), os.environ['RANK'], os.nice(0), flush=True)"
    )
    end = ray.launch(tmp_path, *LAUNCH, "--tee", "all", "script.py")
    assert end.code == 0, end.errors
    said = sorted(line.split(": ")[1].split() for line in end.out.splitlines() if ": node" in line)
    assert {rank for _, rank, _ in said} == {"0", "1", "2", "3", "4", "5"}
    assert [host for host, _, _ in said] == ["node1", "node1", "node2", "node2", "node3", "node3"]
    assert {nice for *_, nice in said} == {"0"}, "Ray's own workers yield to everything"
    wait_for(lambda: free(ray) == NODES * SLOTS, "the end of the reservation")


def test_what_ray_does_not_have_is_told(ray: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    many = ray.launch(tmp_path, *LAUNCH, "--num_nodes", "4", "script.py")
    said = "requested 4 nodes with 2 CPUs each, but the Ray cluster has 3 nodes with CPUs (2, 2, 2)"
    assert many.code == 2 and said in many.errors
    nobody = ray.launch(tmp_path, *LAUNCH, "--address", "10.77.0.99:6379", "script.py")
    assert nobody.code == 2 and "there is no Ray cluster at 10.77.0.99:6379" in nobody.errors


@pytest.mark.parametrize("fault", ["rank", "front end", "raylet"])  # a raylet last: it does not come back
def test_faults(ray: Hosts, tmp_path: Path, fault: str) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    process = ray.start(tmp_path, *LAUNCH, "script.py", "--output-dir", "out")
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(6)), "the ranks")
    since = time.monotonic()
    if fault == "rank":
        (tmp_path / "fail3").write_text("os.kill(os.getpid(), 9)")
    elif fault == "raylet":
        ray("exec", "node2", "--", "pkill", "-9", "raylet")
    else:
        ray("exec", "head", "--", "pkill", "-9", "-f", "^[^ ]*python.* -m launcher.cli.main")
    end = ended(process, since, limit_s=40)
    if fault == "rank":
        assert end.code == 137 and "rank 3 (" in end.errors
    if fault == "raylet":
        assert end.code == 1 and "was lost: the connection ended" in end.errors
    for name in ("node1", "node2", "node3", "head"):
        wait_for(lambda name=name: ranks(ray, name) == [], f"the ranks of {name} to end")  # type: ignore[misc]
    left = NODES - (fault == "raylet")
    wait_for(lambda: free(ray) == left * SLOTS, "the end of the reservation")
