"""`deepspeed.utils.timer`: named timers, and samples per second, for scripts that time themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from launcher.integrations.utilities import log_dist


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Timer:
    """Accumulates the time between start and stop, in milliseconds.

    Args:
        name: name of the timer, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self.elapsed_records: list[float] = []
        self._began = self._milliseconds = 0.0

    def start(self) -> None:
        assert not self.started_, f"{self.name_} timer has already been started"
        self.started_, self._began = True, _now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the timer.

        Args:
            reset: discard the time accumulated before.
            record: record this interval for `mean`.
        """
        assert self.started_, f"{self.name_} timer is not started"
        passed = 1e3 * (_now() - self._began)
        self.started_ = False
        self._milliseconds = passed if reset else self._milliseconds + passed
        if record:
            self.elapsed_records.append(passed)

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds accumulated so far; a running timer continues."""
        if running := self.started_:
            self.stop()
        value = self._milliseconds
        if reset:
            self.reset()
        if running:
            self.start()
        return value

    def mean(self) -> float:
        """Return the mean of the recorded times, without the longest 10 % and the shortest 10 %."""
        return trim_mean(self.elapsed_records, 0.1)

    def reset(self) -> None:
        self.started_, self._milliseconds = False, 0.0
        self.elapsed_records = []


class SynchronizedWallClockTimer:
    """Named timers; on CUDA, the device is synchronized at start and stop."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of each timer, divided by `normalizer`, on one line on `ranks` (default 0)."""
        assert normalizer > 0.0, "normalizer must be above 0: the times are divided by it"
        times = [
            f"{name}: {self(name).elapsed(reset) / normalizer:.2f}" for name in names if name in self.timers
        ]
        log_dist(f"time (ms) | {' | '.join(times)}", ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean of the recorded times of each timer, in milliseconds."""
        assert normalizer > 0.0, "normalizer must be above 0: the times are divided by it"
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means

    @staticmethod
    def memory_usage() -> str:
        """Return the current and peak memory of the CUDA allocator as text, or "" without CUDA."""
        if not torch.cuda.is_available():
            return ""
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        return f" | mem_allocated: {now:.4f} GB | max_mem_allocated: {most:.4f} GB"


SynchronizedWallClockTimer.Timer = Timer  # type: ignore[attr-defined]


class NoopTimer:
    """Accepts the calls of a timer, and measures nothing."""

    class Timer:
        def start(self) -> None: ...
        def reset(self) -> None: ...
        def stop(self, **keywords: Any) -> None: ...
        def elapsed(self, **keywords: Any) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def has_timer(self, name: str) -> bool:
        return True

    def log(self, names: Sequence[str], **keywords: Any) -> None: ...

    def get_mean(self, names: Sequence[str], **keywords: Any) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Measures samples per second, excluding the first steps.

    Args:
        config: provides `enabled` (default: true).
        batch_size: samples per step.
        start_step: number of initial steps that are excluded.
        steps_per_output: number of steps between log messages; None: never log.
        logging_fn: function that logs the message; default: `log_dist`.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.config, self.batch_size = config, max(1, batch_size or 1)
        self.enabled = bool(getattr(config, "enabled", True))
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.logging = logging_fn or log_dist
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._began: float | None = None

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        if self.enabled:
            self._began = _now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Stop the timer.

        Args:
            global_step: whether this ends an optimizer step.
        """
        if self._began is None:
            return
        self.step_elapsed_time += _now() - self._began
        self._began = None
        self.micro_step_count += 1
        if not global_step:
            return
        self.global_step_count += 1
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += self.step_elapsed_time
        self.step_elapsed_time = 0.0
        every = self.steps_per_output
        if report_speed and every and self.global_step_count % every == 0:
            self.logging(f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples/s")

    def avg_samples_per_sec(self) -> float:
        """Return the samples/s over the counted steps; minus infinity before the first, as in DeepSpeed."""
        steps = self.global_step_count - self.start_step
        if steps <= 0 or self.total_elapsed_time == 0:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean of the numbers, without this fraction of the smallest and of the largest ones."""
    assert 0.0 <= trim_percent <= 1.0, "trim_percent must be between 0 and 1"
    ordered = sorted(data)
    if not ordered:
        return 0.0
    cut = int(trim_percent * len(ordered))
    kept = ordered[cut : len(ordered) - cut] or ordered
    return sum(kept) / len(kept)
