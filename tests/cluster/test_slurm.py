"""Inside an allocation of a real Slurm on simulated machines: agents are job steps, without ssh."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.node_kills import prepare, steps_made
from tests.cluster.test_faults import WAITING
from tests.cluster.testbed import CANNOT, SCRIPT, Hosts, ended, thorough, wait_for

pytestmark = thorough
NODES = ("node1", "node2")
LAUNCH = (
    "salloc",
    "-Q",
    "-N2",
    sys.executable,
    "-m",
    "launcher.cli.main",
    "--launcher",
    "slurm",
    "--device",
    "cpu",
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("slurm"))
    hosts("up", 2)
    started = subprocess.run(
        ["sh", str(SCRIPT.parent / "slurm")], env=hosts.env, capture_output=True, text=True, timeout=60
    )
    if started.returncode == CANNOT:
        hosts("down")
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    yield hosts
    hosts("down")


def start(hosts: Hosts, cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, str(SCRIPT), "exec", "head", "--", *LAUNCH, *arguments]
    return subprocess.Popen(
        command, cwd=cwd, env=hosts.env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def left(hosts: Hosts, name: str) -> list[str]:
    return [line for line in hosts.left(name) if not any(word in line for word in ("slurm", "munged"))]


def start_now(hosts: Hosts, job: str) -> None:
    """Start a requeued job at once; Slurm would wait for two minutes.

    Wait until the last process of its first run has ended: otherwise Slurm takes that process's final report for the
    end of the second run.
    """

    def waits() -> bool:
        pending = "JobState=PENDING" in hosts("exec", "head", "--", "scontrol", "show", "job", job)
        return pending and not any("slurmstepd" in line for name in NODES for line in hosts.left(name))

    wait_for(waits, "the end of the first time", limit_s=90)
    hosts("exec", "head", "--", "scontrol", "update", f"JobId={job}", "StartTime=now")


def test_hosts_are_those_of_the_allocation(slurm: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, socket; print(socket.gethostname(), os.environ['RANK'], flush=True)"
    )
    process = start(slurm, tmp_path, "--num_gpus", "2", "--tee", "all", "script.py")
    end = ended(process, time.monotonic(), limit_s=60)
    assert end.code == 0, end.errors
    for rank in range(4):
        host = f"node{rank // 2 + 1}"
        assert f"{host}:{rank}: {host} {rank}\n" in end.out


@pytest.mark.parametrize("fault", ["rank", "front end"])
def test_faults(slurm: Hosts, tmp_path: Path, fault: str) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    process = start(slurm, tmp_path, "--num_gpus", "2", "script.py", "--output-dir", "out")
    wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(4)), "the ranks")
    since = time.monotonic()
    if fault == "rank":
        (tmp_path / "fail3").write_text("os.kill(os.getpid(), 9)")
    else:
        slurm("exec", "head", "--", "pkill", "-9", "-f", "^[^ ]*python.* -m launcher.cli.main")
    end = ended(process, since, limit_s=30)
    wait_for(lambda: not any(left(slurm, name) for name in NODES), "the end of the ranks", limit_s=10)
    assert end.took_s < 10
    if fault == "rank":
        assert end.code == 137 and "rank 3 (node2, local rank 1" in end.errors


def test_submit_runs_the_same_command_in_a_job(slurm: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)"
    )
    flags = (
        "--submit=--wait",
        "--num_nodes",
        "2",
        "--num_gpus",
        "1",
        "--device",
        "cpu",
        "--no_local_rank",
    )
    end = slurm.launch(tmp_path, *flags, "script.py", "--output-dir", "out", "a b")
    assert end.code == 0 and "Submitted batch job" in end.out, end.errors
    (output,) = (tmp_path / "out").glob("slurm-*.out")
    assert "0 2 ['--output-dir', 'out', 'a b']" in output.read_text()


def test_a_job_that_is_queued_again_says_so_to_its_ranks(slurm: Hosts, tmp_path: Path) -> None:
    """With `SLURM_RESTART_COUNT`, recipes resume from the newest checkpoint (`run.py`)."""
    (tmp_path / "script.py").write_text(
        "import os, time; again = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "open(f'rank{os.environ[\"RANK\"]}-{again}', 'w').close(); time.sleep(0 if int(again) else 99)\n"
    )
    flags = ("--submit=--parsable", "--num_nodes", "2", "--num_gpus", "1", "--device", "cpu")
    job = slurm.launch(tmp_path, *flags, "script.py", "--output-dir", "out").out.split()[-1]
    wait_for(lambda: (tmp_path / "rank1-0").exists(), "the first time")
    slurm("exec", "head", "--", "scontrol", "requeue", job)
    start_now(slurm, job)
    wait_for(
        lambda: (tmp_path / "rank1-1").exists() and (tmp_path / "rank0-1").exists(),
        "the second time",
        limit_s=150,
    )
    wait_for(lambda: "COMPLETED" in slurm("exec", "head", "--", "scontrol", "show", "job", job), "its end")
    assert not any(left(slurm, name) for name in NODES)


def test_a_job_whose_time_is_up_saves_and_queues_itself_again(slurm: Hosts, tmp_path: Path) -> None:
    """Slurm's signal, a minute before the limit, is sent manually here. scancel's signal ends the job for good."""
    arguments = (*prepare(tmp_path), "--max-steps", "1000000", "--output-dir", "out")
    flags = ("--submit=--parsable", "--num_nodes", "2", "--num_gpus", "1", *arguments)
    job = slurm.launch(tmp_path, *flags).out.split()[-1]

    wait_for(lambda: steps_made(tmp_path) > 5, "steps")
    slurm("exec", "head", "--", "scancel", "--batch", "--signal=USR1", job)
    start_now(slurm, job)
    wait_for(
        lambda: "resumed from" in (tmp_path / "out/logs/rank0.log").read_text(),
        "the second time",
        limit_s=150,
    )
    made = steps_made(tmp_path)
    wait_for(lambda: steps_made(tmp_path) > made, "more steps")
    slurm("exec", "head", "--", "scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: "FAILED" in slurm("exec", "head", "--", "scontrol", "show", "job", job), "its end")
    said = next((tmp_path / "out").glob("slurm-*.out")).read_text()
    assert said.count("all ranks ended cleanly") == 2 and said.count("SIGTERM: saved after step") == 2
    assert not any(left(slurm, name) for name in NODES)
