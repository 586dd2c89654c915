"""Every installed runner starts and ends a run on two machines."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.cluster.test_faults import running
from tests.cluster.testbed import Hosts, ended, thorough

pytestmark = thorough
TELLING = """
import os, socket
told = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")}
print(socket.gethostname(), told, flush=True)
"""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}


def environment_of(runner: str, directory: Path) -> dict[str, str]:
    """Return the environment for `runner`: `mpirun` must be the right implementation."""
    if runner not in PROGRAMS or runner == "pdsh":
        return {}
    (directory / "bin").mkdir()
    mpirun = directory / "bin" / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nexec {PROGRAMS[runner]} "$@"\n')
    mpirun.chmod(0o755)
    return {**AS_ROOT, "PATH": f"{directory}/bin:{os.environ['PATH']}"}


@pytest.fixture(params=list(PROGRAMS))
def runner(request: pytest.FixtureRequest) -> str:
    program = PROGRAMS[request.param]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here")
    return str(request.param)


def test_ranks_and_environment(hosts: Hosts, tmp_path: Path, runner: str) -> None:
    (tmp_path / "script.py").write_text(TELLING)
    chosen, env = ("--launcher", runner), environment_of(runner, tmp_path)
    common = ("--hostfile", hosts.hostfile(tmp_path, slots=1), "--device", "cpu", "--tee", "all")
    end = hosts.launch(tmp_path, *chosen, *common, "script.py", env=env)
    assert end.code == 0, end.errors
    for rank in (0, 1):
        told = f"{{'RANK': '{rank}', 'LOCAL_RANK': '0', 'WORLD_SIZE': '2', "
        told += "'OMPI_COMM_WORLD_RANK': None, 'PMI_RANK': None}"
        assert f"node{rank + 1}:{rank}: node{rank + 1} {told}" in end.out


@pytest.mark.parametrize("verb", ["rank", "front end", "cut"])
def test_faults(hosts: Hosts, tmp_path: Path, runner: str, verb: str) -> None:
    chosen, env = ("--launcher", runner), environment_of(runner, tmp_path)
    with running(hosts, tmp_path, *chosen, "--node_timeout", "3", env=env) as process:
        since = time.monotonic()
        if verb == "rank":
            (tmp_path / "fail3").write_text("os.kill(os.getpid(), 9)")
        elif verb == "cut":
            hosts("cut", "node2")
        else:
            hosts("exec", "head", "--", "pkill", "-9", "-f", "launcher.cli.main")
        end = ended(process, since, limit_s=30)
        for name in ("node1", "node2", "head"):
            left = hosts.wait_until_empty(name, limit_s=10)
            # Open MPI's own daemon waits for TCP on a node that is cut off.
            assert [line for line in left if "orted" not in line] == []
    assert end.took_s < 12
    if verb == "rank":
        assert end.code == 137 and "rank 3 (node2, local rank 1" in end.errors
    if verb == "cut":
        assert end.code == 1 and "node2 was lost" in end.errors
