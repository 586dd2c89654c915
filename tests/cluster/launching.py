"""Starts `launch` on tiny scripts without torch, and looks at what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


def environment(threads: int | None = 1) -> dict[str, str]:
    """Of a process that a test starts.

    Args:
        threads: of OpenMP in each rank; None lets `launch` choose. Beside other processes more than one spin and wait.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTHONSTARTUP")}
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**inherited, **chosen, "PYTHONPATH": str(ROOT)}


def started(arguments: tuple[str, ...], cwd: Path, threads: int | None = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launcher.cli.main", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment(threads), stdout=pipe, stderr=pipe, text=True)


def launch(*arguments: str, cwd: Path, threads: int | None = 1) -> subprocess.CompletedProcess[str]:
    """Run `launch` to its end."""
    process = started(arguments, cwd, threads)
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()  # does nothing once it has ended
    return subprocess.CompletedProcess(arguments, process.wait(), out, errors)


@contextmanager
def launching(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """`launch` in the background; whatever is left of it is killed at the end."""
    process = started(arguments, cwd)
    try:
        yield process
    finally:
        for pid in [process.pid, *pids_in(cwd)]:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        process.wait()


def pids_in(cwd: Path) -> list[int]:
    """Process ids that scripts wrote as names of files `*.pid` into their directory."""
    return [int(path.stem) for path in cwd.glob("*.pid")]


def alive(pids: list[int]) -> list[int]:
    """Those that still run (a zombie does not)."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(path: Path) -> str:
    """The content of a file that a rank is going to write."""
    deadline = time.monotonic() + LIMIT_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} was not written"
        time.sleep(0.02)
    return path.read_text()


def wait_until_gone(pids: list[int], limit_s: float) -> list[int]:
    """Those that are still alive after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive(pids)
