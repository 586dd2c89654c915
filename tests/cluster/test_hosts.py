"""`launch report`, `launch ssh` and `--dry_run`."""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from launcher.cluster.run_status import RunStatus
from tests.cluster.launching import ROOT, launch
from tests.cluster.testbed import Hosts, ended, thorough, wait_for


def test_report_of_this_machine(tmp_path: Path) -> None:
    done = launch("report", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("localhost\n")
    for name in ("python", "torch", "cores", "memory", "gpus", "clock"):
        assert f"\n  {name} " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_report_and_ssh_of_several(hosts: Hosts, tmp_path: Path) -> None:
    hosts("refuse", "node2")
    hostfile = hosts.hostfile(tmp_path)
    report = hosts.launch(tmp_path, "report", "--hostfile", hostfile)
    assert report.code == 1 and "node1\n  host          node1\n" in report.out
    assert "node2\n  not ready   ssh ended with 255" in report.out
    ssh = hosts.launch(
        tmp_path, "ssh", "--hostfile", hostfile, "--include", "node1", "echo $((20+1)); exit 3"
    )
    assert (ssh.code, ssh.out) == (3, "node1: 21\n")


def test_a_run_on_other_hosts_is_looked_at(hosts: Hosts, tmp_path: Path) -> None:
    run, here = tmp_path / "run", tmp_path / "here"
    for directory in (run / "logs", here):
        directory.mkdir(parents=True)
    status = RunStatus("launch train.py")
    status.begin(str(run / "logs"), [("node1", 1)], [], restarts=0)
    status.take([{"rank": 0, "pid": 1, "doing": "all_gather", "since_s": 0.1, "counters": None}])
    status.tick()
    hostfile = hosts.hostfile(tmp_path, more="nowhere slots=1\n")
    once = hosts.launch(here, "top", "--hostfile", hostfile, "--once", str(run))
    assert once.code == 0 and "  node1:/" in once.out, once.errors
    page = hosts.launch(here, "top", "--hostfile", hostfile, "--html", "page.html", str(run))
    assert page.code == 0 and "launch train.py" in (here / "page.html").read_text()
    back = hosts.launch(here, "top", "--hostfile", hostfile, "--html", "-", str(run))
    assert back.code == 2 and "the run is on another host" in back.errors
    none = hosts.launch(here, "top", "--hostfile", hostfile, "--once")
    assert none.code == 2 and "no run was found on the hosts of the hostfile (node1: no run; " in none.errors
    assert hosts.left("node1") == hosts.left("head") == []


def test_dry_run_prints_the_commands_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@w0 slots=2\nw1 slots=2\n")
    (tmp_path / "script.py").write_text("")
    done = launch("-H", "hosts", "--ssh_port", "2222", "--dry_run", "script.py", cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if "ssh" in line]
    assert done.returncode == 0 and [line.split()[0] for line in lines] == ["me@w0", "w1"]
    assert " -- me@w0 " in lines[0] and " -p 2222 " in lines[1] and " -- w1 " in lines[1]
    assert not (tmp_path / "runs").exists()


def test_nodes_that_come_by_themselves(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time\n"
        "while not os.path.exists('refused'):\n"
        "    time.sleep(0.05)\n"
        "print(os.environ['RANK'], os.environ['WHERE'], flush=True)\n"
    )
    flags = ("--no_ssh", "--num_nodes", "2", "--num_gpus", "2", "--device", "cpu", "--tee", "all")
    flags += ("--master_addr", "node1", "--node_timeout", "4")
    token = {"LAUNCHER_TOKEN": "0123456789abcdef"}
    stranger = hosts.start(
        tmp_path,
        *flags,
        "--node_rank",
        "1",
        "script.py",
        env={"LAUNCHER_TOKEN": "another-token-of-some-length"},
        name="node2",
    )
    later = hosts.start(
        tmp_path, *flags, "--node_rank", "1", "script.py", env={**token, "WHERE": "there"}, name="node2"
    )
    first = hosts.start(
        tmp_path, *flags, "--node_rank", "0", "script.py", env={**token, "WHERE": "here"}, name="node1"
    )
    refused = ended(stranger, time.monotonic(), limit_s=40)
    assert refused.code == 2 and "rejected this node" in refused.errors
    (tmp_path / "refused").touch()  # a stranger that came after the run would wait for another
    end = ended(first, time.monotonic(), limit_s=40)
    assert end.code == 0, end.errors
    assert sorted(line for line in end.out.splitlines() if line.startswith("node")) == [
        f"node{rank // 2}:{rank}: {rank} {'there' if rank > 1 else 'here'}" for rank in range(4)
    ]
    assert ended(later, time.monotonic(), limit_s=10).code == 0


TORCH = next(file for file in metadata.files("torch") or [] if file.name == "METADATA").locate().parent
AWKWARD = "a  b 'c' \"d\" $HOME `id` \\ %n ! *\nä\t"


def test_values_and_arguments_arrive_as_they_are_and_are_not_seen(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import json, os, pathlib, sys, time\n"
        "json.dump([os.environ['SECRET'], sys.argv[1:]], open('told' + os.environ['RANK'] + '.tmp', 'w'))\n"
        "os.rename('told' + os.environ['RANK'] + '.tmp', 'told' + os.environ['RANK'])\n"
        "while not pathlib.Path('seen').exists(): time.sleep(0.05)\n"
    )
    flags = ("--hostfile", hosts.hostfile(tmp_path, slots=1), "--device", "cpu", "--export", "SECRET")
    process = hosts.start(
        tmp_path, *flags, "--no_local_rank", "script.py", AWKWARD, env={"SECRET": AWKWARD + "key"}
    )
    told = [tmp_path / f"told{rank}" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() for path in told), "the ranks")
    shown = hosts("ps", "head") + hosts("ps", "node1") + hosts("ps", "node2")
    (tmp_path / "seen").touch()
    assert ended(process, time.monotonic(), limit_s=20).code == 0
    assert [json.loads(path.read_text()) for path in told] == [[AWKWARD + "key", [AWKWARD]]] * 2
    assert "bootstrap" not in shown and "key" not in shown.replace("test_key", "")


@thorough
@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (sys.executable, "is " + sys.executable + " installed there?"),
        (str(ROOT / "launcher" / "cluster"), "its Python cannot import launcher.cluster.agent"),
        (str(TORCH), "torch is not installed, but "),
    ],
    ids=["python", "launcher", "torch"],
)
def test_what_is_missing_on_one_node(hosts: Hosts, tmp_path: Path, hidden: str, said: str) -> None:
    (tmp_path / "script.py").write_text("open('started', 'w')")
    hosts("hide", "node2", hidden)
    end = hosts.launch(tmp_path, "--hostfile", hosts.hostfile(tmp_path), "script.py")
    assert end.code == 2 and end.took_s < 10 and "1 of 2 hosts is not ready" in end.errors
    assert said in end.errors and not (tmp_path / "started").exists()
