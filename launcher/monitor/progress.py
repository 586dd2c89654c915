"""Progress output of a run: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from launcher.monitor.metrics import is_number

RECENT_STEPS = 20
"""Number of steps whose median is used to estimate the time left."""

WIDTH_WITH_BAR = 110


class ProgressLine:
    """Shows each optimizer step; use it as a context manager, on rank 0 (`enabled=False` on other ranks).

    On a terminal, one line is updated in place. Otherwise, a plain line is printed every `steps_per_print`
    steps, and for the first and the last step.

    Args:
        total_steps: the last step of the run.
        steps_per_print: interval of plain lines; None or infinity prints only the first and the last one.
        enabled: False shows nothing.
        console: the console to print to; standard output by default.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        steps_per_print: float | None = 10,
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        self.total_steps = total_steps
        self._every = steps_per_print
        self._enabled = enabled
        self._console = console or Console()
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._shown_any = False
        self._live: Progress | None = None
        self._task = TaskID(0)

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the record of one step, as `MetricsWriter.write` returns it."""
        if not self._enabled:
            return
        self._times.append(float(record["step_time_s"]))
        step = int(record["step"])
        line = self.describe(record)
        if self._live is not None:
            self._live.update(self._task, completed=step, line=line)
        elif self._is_printed(step):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._shown_any = True

    def message(self, text: str) -> None:
        """Print a separate line without breaking the live one."""
        if self._enabled:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def describe(self, record: Mapping[str, Any]) -> str:
        """Return `step 20/100  loss 2.3456  lr 0.001  grad norm 0.812  12.3k tok/s  0:01:20 left`."""
        step = int(record["step"])
        parts = [f"step {step}/{self.total_steps}", f"loss {_number(record['loss'], '.4f')}"]
        if is_number(record.get("eval_loss")):
            parts.append(f"eval {record['eval_loss']:.4f}")
        parts.append(f"lr {record['lr']:.3g}")
        if record.get("grad_norm") is not None or "grad_norm" in record.get("nonfinite", ()):
            parts.append(f"grad norm {_number(record['grad_norm'], '.3f')}")
        parts.append(f"{short_number(record['tokens_per_s'])} tok/s")
        if self._times and step < self.total_steps:
            parts.append(f"{duration(statistics.median(self._times) * (self.total_steps - step))} left")
        return "  ".join(parts)

    def __enter__(self) -> ProgressLine:
        if self._enabled and self._console.is_terminal:
            line = TextColumn("{task.fields[line]}")
            # The numbers need about 80 columns; the bar is added if there is space for both.
            columns = (BarColumn(bar_width=20), line) if self._console.width >= WIDTH_WITH_BAR else (line,)
            self._live = Progress(*columns, console=self._console)
            self._task = self._live.add_task("", total=self.total_steps, line="waiting for the first step")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_printed(self, step: int) -> bool:
        if not self._shown_any or step >= self.total_steps:
            return True
        return self._every is not None and step % self._every == 0


def _number(value: float | None, form: str) -> str:
    return "not finite" if not is_number(value) else format(value, form)


def short_number(value: float) -> str:
    """Return `950`, `12.3k`, `4.56M`, `7.89G`."""
    for limit, unit, digits in ((1e9, "G", 2), (1e6, "M", 2), (1e3, "k", 1)):
        if value >= limit:
            return f"{value / limit:.{digits}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return `h:mm:ss`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
