"""`RunMirror`: the files of a run on other hosts. Here `ssh` is a script that succeeds or fails at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.cluster.hostfile import Host
from launcher.cluster.run_mirror import RunMirror
from launcher.cluster.run_status import RunStatus
from launcher.cluster.runners import RunnerOptions
from launcher.errors import ConfigError

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
case "$2" in
    deep) yes '[' | head -c 200000 | tr -d '\\n' | sed 's/^/{"a":/'; echo ;;
    liar) echo '{"is": "run", "directory": {"a": 1}, "written": 9e99}'; echo '{"is": "sent"}'; exec sleep 60 ;;
    closed) echo 'connection refused' >&2; exit 255 ;;
    *) echo 'a banner'; exec sh -c "$3" ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a run, and an `ssh` that reaches it under every host name except some."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    directory = tmp_path / "[run]"  # a name that a pattern would read otherwise
    (directory / "logs").mkdir(parents=True)
    status = RunStatus("launch train.py")
    status.begin(str(directory / "logs"), [("node1", 1)], [], restarts=0)
    status.tick()
    (directory / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": {n}}}\n' for n in range(1, 4)))
    (directory / "logs" / "node1.rank0.log").write_text("what it said\n")
    return directory


@pytest.mark.parametrize("names", [["one"], ["deep", "one"], ["liar", "closed", "two", "one"]], ids=str)
def test_all_that_a_host_has_is_here_at_once(run: Path, names: list[str]) -> None:
    with RunMirror([Host(name, (0,)) for name in names], RunnerOptions(), str(run)) as mirror:
        mirror.wait()
        assert mirror.called.partition(":")[2] == str(run)
        assert json.loads(mirror.status.read_text())["command"] == "launch train.py"
        assert (mirror.directory / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
        mirror.ask_stacks()
        mirror.ask_log(0)
        log, asked = mirror.directory / "logs" / "rank0.log", run / "logs" / "stacks.asked"
        wait = threading.Event()
        for _ in range(100):
            if log.exists() and asked.exists():
                break
            wait.wait(0.1)
        assert log.read_text() == "what it said\n" and asked.exists()
    assert not mirror.directory.exists()


def test_no_run_is_told_with_what_hosts_say(run: Path) -> None:
    hosts = [Host("closed", (0,)), Host("one", (0,))]
    with (
        RunMirror(hosts, RunnerOptions(), str(run / "not")) as mirror,
        pytest.raises(ConfigError, match="closed: connection refused; one: no run"),
    ):
        mirror.wait()


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("one slots=1\n")
    argv = ["top", str(run), "--hostfile", str(tmp_path / "hosts")]
    assert main([*argv, "--once"]) == 0 and "loss 3.0000" in capsys.readouterr().out
    assert main([*argv, "--html", str(tmp_path / "page.html")]) == 0
    assert "<polyline" in (tmp_path / "page.html").read_text()
