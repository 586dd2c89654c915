"""Launches on pretend machines, and what is left there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.launching import ROOT, environment

thorough = pytest.mark.skipif(
    not os.environ.get("LAUNCHER_TEST_CLUSTER"), reason="`make cluster` runs it: it takes long"
)
SCRIPT = ROOT / "tests" / "testbed" / "hosts.py"
CANNOT = 77
START_S = 120
"""Limits are for hangs: on a busy machine a start of four ranks takes half a minute."""
END_S = 180


@dataclass
class Ended:
    """How a launch ended."""

    code: int
    out: str
    errors: str
    took_s: float
    """Since the fault, or since the start."""


class Hosts:
    """The machines head, node1, ... of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**environment(), "HOSTS_DIR": str(folder / "hosts")}

    def __call__(self, verb: str, *args: object) -> str:
        """Run a verb of `hosts.py` to its end."""
        argv = [sys.executable, str(SCRIPT), verb, *map(str, args)]
        owner = ["--owner", str(os.getpid())] if verb == "up" else []
        done = subprocess.run(
            argv + owner, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        if done.returncode == CANNOT and verb == "up":
            if os.environ.get("HOSTS_REQUIRED"):
                pytest.fail(done.stderr.strip())
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, f"hosts {verb} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def hostfile(self, directory: Path, slots: int = 2, more: str = "") -> str:
        path = directory / "hostfile"
        path.write_text(self("hostfile", "--slots", slots) + more)
        return str(path)

    def start(
        self, cwd: Path, *arguments: str, env: dict[str, str] | None = None, name: str = "head"
    ) -> subprocess.Popen[str]:
        """`launch ARGUMENTS` on a machine."""
        launch = [sys.executable, "-m", "launcher.cli.main", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), "exec", name, "--", *launch],
            **{"cwd": cwd, "env": {**self.env, **(env or {})}},
            **{"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True},
        )

    def launch(self, cwd: Path, *arguments: str, env: dict[str, str] | None = None) -> Ended:
        """The same, to its end."""
        return ended(self.start(cwd, *arguments, env=env), time.monotonic(), limit_s=END_S)

    def left(self, name: str) -> list[str]:
        """What still runs on a machine that is none of its own."""
        return [line for line in self("ps", name).splitlines() if "sshd" not in line]

    def wait_until_empty(self, name: str, limit_s: float) -> list[str]:
        """What is left on a machine after at most so long."""
        deadline = time.monotonic() + limit_s
        while (left := self.left(name)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def ended(process: subprocess.Popen[str], since: float, limit_s: float) -> Ended:
    """Wait for a launch; it is killed when it takes too long."""
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, errors = process.communicate()
        raise AssertionError(f"it has not ended within {limit_s} s:\n{out}\n{errors}") from None
    return Ended(process.returncode, out, errors, time.monotonic() - since)


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.05)
