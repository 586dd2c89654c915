"""A background thread that runs jobs one after another, so that the caller need not wait."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch


class BackgroundThread:
    """A thread that runs one job after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[BackgroundCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def start(self, run: Callable[[], None]) -> BackgroundCall:
        """Queue `run` for the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="peer-memory")
            self._thread.start()
        job = BackgroundCall(run)
        self._jobs.put(job)
        return job


class BackgroundCall:
    """A call in the thread; `wait` raises the exception of the call."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: BaseException | None = None

    def __call__(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        try:
            with torch.no_grad():
                run()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def _work(jobs: queue.SimpleQueue[BackgroundCall | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise its buffers would live until the next job
