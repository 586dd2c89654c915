"""Run one of their distributed tests on its own ranks, forked from a process with all imports done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = ["tests.parity_deepspeed.upstream.preload"]
GRACE_S = 3.0
"""How long the other ranks may run after a rank has failed; usually they wait for it in a collective."""

Outcome = tuple[str, str]
"""`passed`, `failed` or `skipped`, and the message."""


def run_on_ranks(test: Any, world: int, init_method: str, limit_s: float) -> Outcome:
    """Run `test._dist_run`, the body of one of their tests with its setup, on `world` ranks.

    Returns:
        The worst outcome of any rank: that of the first rank to fail.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, ends, processes = _free_port(), [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(there, test._dist_run, (rank, world, port, init_method))
        )
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        return _worst(ends, time.monotonic() + limit_s, limit_s)
    finally:
        for process in processes:
            _end(process)
        for buffer in Path("/dev/shm").glob(
            f"deepspeed_*_{port}_*"
        ):  # 66 MiB each; killed processes leave them
            buffer.unlink(missing_ok=True)


def _worst(ends: list[Connection], by: float, limit_s: float) -> Outcome:
    worst: Outcome = ("passed", "")
    waiting = list(ends)
    while waiting:
        ready = wait(waiting, max(by - time.monotonic(), 0))
        if not ready:
            return worst if worst[0] == "failed" else ("failed", f"not done after {limit_s:g} s")
        for end in ready:
            assert isinstance(end, Connection)
            waiting.remove(end)
            outcome = _received(end)
            if worst[0] == "passed" or (outcome[0] == "failed" and worst[0] == "skipped"):
                worst = outcome
            if outcome[0] == "failed":
                by = min(by, time.monotonic() + GRACE_S)
    return worst


def _received(end: Connection) -> Outcome:
    try:
        kind, text = end.recv()
    except EOFError:
        return "failed", "the process of a rank ended"
    return kind, text


def _rank(end: Connection, body: Callable[..., Any], given: tuple[Any, ...]) -> None:
    os.setpgrp()
    end.send(_outcome(body, given))
    sys.stdout.flush()
    # leftovers of the test do not matter, and the other ranks no longer need this one
    signal.pause()


def _outcome(body: Callable[..., Any], given: tuple[Any, ...]) -> Outcome:
    try:
        said = body(*given)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        first = " ".join(f"{type(error).__name__}: {error}".split("\n")[:3])
        text = (
            f"{first} [{Path(place.filename).name}:{place.lineno}: {place.line}]\n\n{traceback.format_exc()}"
        )
        return ("skipped", str(error)) if type(error).__name__ == "Skipped" else ("failed", text)
    return ("skipped", said) if said else ("passed", "")


def _end(process: Any) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
