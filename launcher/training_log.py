"""Logs the progress of a training run: metrics, the progress line, and the timeline of the pipeline."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from launcher.engine import Engine, report
from launcher.monitor.metrics import METRICS, MetricsWriter, read_metrics
from launcher.monitor.progress import ProgressLine
from launcher.monitor.utilisation import Utilisation, flops_per_token, peak_of
from launcher.pipeline.timeline.recording import TIMELINE
from launcher.run import Run

DRAWN_EVERY = 20
"""Optimizer steps between two timelines; gathering one takes a collective along pp."""


class TrainingLog:
    """Logs each step on rank 0; use it as a context manager.

    With several replicas (`fault_tolerance`), only the leader writes metrics. The leader may change during
    the run.

    Args:
        total_steps: optimizer steps of the run, to estimate the remaining time.
        length: tokens per sequence.
    """

    def __init__(self, run: Run, engine: Engine, total_steps: int, length: int) -> None:
        self._run, self._engine = run, engine
        self._metrics: MetricsWriter | None = None
        self._unwritten: dict[str, Any] | None = None  # last record, which the leader writes
        self._progress = ProgressLine(
            total_steps,
            steps_per_print=engine.steps_per_print() or 10,
            enabled=run.rank == 0,
            console=run.console,
        )
        self.say = self._progress.message
        self._utilisation: Utilisation | None = None
        if (peak := peak_of(engine.device)) is not None:
            per_token = flops_per_token(engine.module.config, report.active_parameters(engine), length)
            self._utilisation = Utilisation(per_token, peak * engine.world_size * run.replicas)

    def __enter__(self) -> TrainingLog:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def note(self, record: dict[str, Any], *, leads: bool) -> None:
        """Log the record of a step. Every rank must call it."""
        self._draw()
        if self._run.rank != 0:
            return
        if self._utilisation is not None:
            record["mfu"] = self._utilisation.of(record["tokens_per_s"])
        if not leads:
            self.close()
            self._unwritten = record
            self._progress.update(record)
            return
        if self._metrics is None:
            self.open(int(record["step"]) - 1)
        assert self._metrics is not None
        self._progress.update(self._metrics.write(**record))

    def open(self, made: int) -> None:
        """Continue the metrics after step `made`; write that step if the previous leader did not."""
        file = self._run.output_dir / METRICS
        before, self._unwritten = self._unwritten, None
        self._metrics = MetricsWriter(file, resume_step=made)
        if (
            before is not None
            and before["step"] == made
            and made not in {r["step"] for r in read_metrics(file)}
        ):
            self._metrics.write(**before)

    def close(self) -> None:
        """Close the metrics file."""
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = None

    def _draw(self) -> None:
        """Periodically write the last step's pipeline timeline, but not the first: it includes setup."""
        if self._engine.global_steps % DRAWN_EVERY == 2:
            report.write_timeline(
                self._engine, self._run.output_dir / TIMELINE if self._run.rank == 0 else None
            )
