"""`WorkerPool`: ranks that are started once and run one function after another.

Each world size has its own processes, started at the first use, so torch.distributed's default group and the
environment (RANK, WORLD_SIZE, ...) are those of the run. All are forked from one server process that has imported torch
and transformers. Starting the ranks takes a fraction of a second, and so does replacing them after a failure.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.pool.worker import Answer, Job, Place, serve

PRELOAD = (
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "launcher.engine.assemble",
    "launcher.engine.executor",
    "launcher.engine.state",
    "launcher.zero.apply",
    "launcher.offload.nvme",
    "tests.pool.worker",
    "tests.pool.frozen",
)
START_LIMIT_S = 120.0
GRACE_S = 2.0  # after the first failure: time for the other ranks to report theirs
LOG_TAIL = 2000  # characters of a rank's output shown with a failure


class RanksFailed(Exception):
    """A function failed on some rank: `failures` maps rank -> traceback, or how the rank ended."""

    def __init__(self, summary: str, failures: dict[int, str]) -> None:
        self.failures = failures
        parts = [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in failures.items()]
        super().__init__("\n".join([summary, *parts]))


class WorkerPool:
    """Long-lived gloo ranks on this machine, for tests.

    Example:
        def total(ctx: RankContext, start: int) -> float:   # at module level: ranks import it by name
            t = torch.tensor(float(start + ctx.rank))
            dist.all_reduce(t)
            return t.item()

        def test_total(pool: WorkerPool) -> None:
            assert pool.run(total, 2, 10) == [21.0, 21.0]
    """

    def __init__(self, preload: tuple[str, ...] = PRELOAD) -> None:
        """Create a pool.

        `preload`: modules that every rank imports at its start; the first pool of a process determines them.
        """
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
        self._crews: dict[int, _Crew] = {}
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(ctx, *args, **kwargs)` on `world` ranks.

        Args:
            fn: a function at module level; its arguments and result are pickled (tensors are copied by value).
            world: number of ranks; the default process group has exactly these.
            timeout: seconds until the run counts as hung.

        Returns:
            The return value of each rank, in the order of ranks.

        Raises:
            RanksFailed: a rank raised, died or did not answer in time. The ranks are replaced afterwards.
        """
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is not at module level: the ranks could not import it")
        job = Job(fn.__module__, fn.__qualname__, args, kwargs)
        crew = self._crews.get(world) or self._start(world)
        try:
            answers = crew.run(job, timeout)
        except BaseException:
            self._discard(world)
            raise
        if any(answer.spoiled for answer in answers):
            self._discard(world)
        return [answer.value for answer in answers]

    def close(self) -> None:
        """End all ranks."""
        for world in list(self._crews):
            self._discard(world)
        atexit.unregister(self.close)

    def pids(self, world: int) -> list[int]:
        """Return the process ids of the ranks for this world size; empty before the first run."""
        crew = self._crews.get(world)
        return [process.pid or 0 for process in crew.processes] if crew else []

    def _start(self, world: int) -> _Crew:
        crew = self._crews[world] = _Crew(world)
        try:
            crew.collect("start", START_LIMIT_S)
        except BaseException:
            self._discard(world)
            raise
        return crew

    def _discard(self, world: int) -> None:
        self._crews.pop(world).kill()


class _Crew:
    """The ranks of one world size and their pipes."""

    def __init__(self, world: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"pool{world}-"))
        port = _free_port()
        self.places = [Place(rank, world, self.directory, port) for rank in range(world)]
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        for place in self.places:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(place, theirs), name=f"rank {place.rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, job: Job, timeout: float) -> list[Answer]:
        message = pickle.dumps(job)
        for pipe in self.pipes:
            pipe.send_bytes(message)
        return self.collect(f"{job.module}.{job.qualname}", timeout)

    def collect(self, name: str, timeout: float) -> list[Answer]:
        """Wait for one answer per rank. Raises `RanksFailed` with all available information."""
        answers: dict[int, Answer] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(answers) + len(failures) < len(self.pipes):
            open_ranks = [r for r in range(len(self.pipes)) if r not in answers and r not in failures]
            ready = wait([self.pipes[r] for r in open_ranks], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (r for r in open_ranks if self.pipes[r] in ready):
                answer = self._receive(rank)
                if answer.error is None:
                    answers[rank] = answer
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failures[rank] = answer.error
        silent = [r for r in range(len(self.pipes)) if r not in answers and r not in failures]
        if failures or silent:
            raise self._failure(name, timeout, failures, silent)
        return [answers[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _receive(self, rank: int) -> Answer:
        try:
            answer: Answer = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            return Answer(error=f"the process ended, exit code {code}\n{_tail(self.places[rank].stacks)}")
        return answer

    def _failure(
        self, name: str, timeout: float, failures: dict[int, str], silent: Iterable[int]
    ) -> RanksFailed:
        """Return the failure: ranks that raised come first, then the stacks of ranks that were still running."""
        stacks = self._stacks(silent)
        if failures:
            first = next(iter(failures))
            reason = f"rank {first} failed: {_last_line(failures[first])}"
        else:
            reason = f"no answer within {timeout:g} s from rank {', '.join(map(str, stacks))}"
        texts = failures | {rank: f"still running:\n{stack}" for rank, stack in stacks.items()}
        for rank, text in texts.items():
            output = _tail(self.places[rank].log)
            texts[rank] = f"{text}\nits output:\n{output}" if output else text
        return RanksFailed(f"{name} on {len(self.pipes)} ranks: {reason}", texts)

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        asked = [rank for rank in ranks if self.processes[rank].is_alive()]
        for rank in asked:
            os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        end = time.monotonic() + 2.0
        while time.monotonic() < end and not all(self.places[r].stacks.stat().st_size for r in asked):
            time.sleep(0.05)
        time.sleep(0.05 if asked else 0.0)  # the last lines
        return {rank: self.places[rank].stacks.read_text() for rank in asked}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(file: Path) -> str:
    return file.read_text(errors="replace")[-LOG_TAIL:].strip() if file.exists() else ""


def _last_line(text: str) -> str:
    """Return the line of a traceback that names the exception."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if lines else text
