"""Ranks of a peer, forked from one process that has imported it, because imports take longer than most runs.

Each rank is a separate process, so changes that a peer makes in one run do not affect the next.

    peer = Peer("tests.parity_deepspeed.deepspeed_side", "deepspeed")
    codes = peer.run(["train", "JOBS.json", "OUT.json"], [environment of each rank], [log of each rank], limit)
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Code = int | str


class Peer:
    """The process that ranks are forked from. It starts at the first run and ends with this process.

    Args:
        module: the module whose `main()` a rank calls.
        before: modules to import before it.
    """

    def __init__(self, module: str, *before: str) -> None:
        self._modules = (*before, module)
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        arguments: Sequence[str],
        ranks: Sequence[Mapping[str, str]],
        logs: Sequence[Path],
        limit_s: float,
    ) -> list[Code]:
        """Run it on ranks; return the exit code of each, or how it ended.

        Args:
            ranks: the environment of each rank.
            logs: a file for the output of each rank.
            limit_s: seconds until ranks are killed.
        """
        process = self._process or self._start(ranks[0])
        job = {
            "arguments": [*arguments],
            "ranks": [dict(rank) for rank in ranks],
            "logs": [str(log) for log in logs],
            "limit_s": limit_s,
        }
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{json.dumps(job)}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the process that {self._modules[-1]} is forked from has ended"
        codes: list[Code] = json.loads(answer)
        return codes

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", __name__, *self._modules]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=dict(environment), **pipes)
        atexit.register(self._process.kill)
        return self._process


def main() -> None:
    """Run the process that ranks are forked from: read one line of JSON per run, and write one line with the exit
    codes.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print
    for name in sys.argv[1:]:
        module = importlib.import_module(name)
    _ask_once_for_the_cpu()
    importlib.import_module("tests.pool.frozen")
    for line in sys.stdin:
        job = json.loads(line)
        ranks = zip(job["ranks"], job["logs"], strict=True)
        pids = [_fork(module, job["arguments"], environment, log) for environment, log in ranks]
        print(json.dumps(_codes(pids, job["limit_s"])), file=answers, flush=True)


def _ask_once_for_the_cpu() -> None:
    """Cache the CPU check that DeepSpeed makes before it loads an operator, because each one starts two processes."""
    try:
        import cpuinfo
    except ImportError:
        return
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()


def _fork(module: Any, arguments: list[str], environment: dict[str, str], log: str) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [module.__name__, *arguments]
        module.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _codes(pids: list[int], limit_s: float) -> list[Code]:
    """Wait for ranks. No rank outlives the tests: their end closes standard input."""
    codes: dict[int, Code] = {}
    by = time.monotonic() + limit_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        orphaned = bool(select.select([sys.stdin], [], [], 0.02)[0])
        if orphaned or time.monotonic() > by:
            for pid in [pid for pid in pids if pid not in codes]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = f"has not ended in {limit_s:g} s"
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()
