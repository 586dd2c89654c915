"""Wall-clock time of the phases of a step (`wall_clock_breakdown`)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from launcher.monitor.flight_recorder import COUNTED

if TYPE_CHECKING:
    import torch

PHASES = ("forward", "backward", "reduce", "step")
_OFF = nullcontext()


class Timers:
    """Adds up the time of named phases: `with timers("forward"): ...`.

    A phase may be entered many times per step (microbatches), and phases may nest: each one counts its total
    time, including nested phases.

    Args:
        enabled: False makes every call do nothing.
        device: CUDA devices are synchronized at both ends of a phase, since otherwise only kernel launches
            would be measured. This slows the run down, and happens only while enabled.

    Attributes:
        last_step: milliseconds of each phase in the last step that ended with `end_step`.
    """

    def __init__(self, *, enabled: bool, device: torch.device | str = "cpu") -> None:
        self.enabled = enabled
        self._device = device if enabled and str(device).startswith("cuda") else None
        self._seconds: dict[str, float] = defaultdict(float)
        self._before_step: dict[str, float] = {}
        self.last_step: dict[str, float] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which phase `name` runs."""
        return _Phase(self, name) if self.enabled else _OFF

    def now(self) -> float:
        """Return the time of a monotonic clock in seconds, after synchronizing CUDA."""
        if self._device is not None:
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to phase `name`."""
        self._seconds[name] += seconds

    def end_step(self) -> None:
        """End an optimizer step: set `last_step` to the times since the previous one."""
        new = {name: 1000 * (all_ - self._before_step.get(name, 0.0)) for name, all_ in self._seconds.items()}
        self.last_step, self._before_step = _in_order(new), dict(self._seconds)

    def mean_ms(self, steps: int, *, reset: bool = True) -> dict[str, float]:
        """Return the milliseconds per optimizer step of each phase, averaged over the `steps` since the last reset."""
        means = {name: 1000 * seconds / max(steps, 1) for name, seconds in self._seconds.items()}
        if reset:
            self._seconds.clear()
            self._before_step.clear()
        return _in_order(means)

    def line(self, steps: int) -> str:
        """Return one line, `forward 12.3 ms | backward ...`, and reset; empty if nothing was timed."""
        return " | ".join(f"{name} {ms:.1f} ms" for name, ms in self.mean_ms(steps).items())


def _in_order(times: dict[str, float]) -> dict[str, float]:
    order = {name: i for i, name in enumerate(PHASES)}
    return dict(sorted(times.items(), key=lambda item: order.get(item[0], len(order))))


class StepClock:
    """Adds up phases like `Timers`, but always, without synchronization, and with separate waits for others.

    Args:
        waited: returns the seconds that this process has waited for other ranks so far.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self.waited = waited
        self.seconds = dict.fromkeys(COUNTED, 0.0)
        self.waits = dict.fromkeys(COUNTED, 0.0)
        self.steps = 0
        self._first: float | None = None
        self._phases = {name: _CountedPhase(self, name) for name in COUNTED}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which phase `name` runs; phases do not nest."""
        return self._phases[name]

    def end_step(self) -> float:
        """End an optimizer step; return the seconds since the end of the first step.

        The first step is a warmup: its end resets all sums.
        """
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self.seconds, self.waits = dict.fromkeys(COUNTED, 0.0), dict.fromkeys(COUNTED, 0.0)
        else:
            self.steps += 1
        return now - self._first


class _CountedPhase(AbstractContextManager[None]):
    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self._name = clock, name
        self._began = self._waited = 0.0

    def __enter__(self) -> None:
        self._waited, self._began = self._clock.waited(), time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clock = self._clock
        clock.seconds[self._name] += time.perf_counter() - self._began
        clock.waits[self._name] += clock.waited() - self._waited


class _Phase(AbstractContextManager[None]):
    def __init__(self, timers: Timers, name: str) -> None:
        self._timers, self._name = timers, name

    def __enter__(self) -> None:
        self._begin = self._timers.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timers.add(self._name, self._timers.now() - self._begin)
