"""The configured measurements of a training engine: times, memory, FLOPs, collectives, and monitors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.comm import Mesh, Timing, all_reduce, observe_collectives
from launcher.comm.log import read_log, start_log, stop_log
from launcher.comm.pending import waits
from launcher.comm.plain import broadcast_from_first
from launcher.comm.record import recorder
from launcher.config import Config
from launcher.errors import ConfigError
from launcher.monitor.flight_recorder import StepCounters
from launcher.monitor.log import say
from launcher.monitor.memory import MemoryBreakdown, current_memory_bytes, peak_memory_bytes
from launcher.monitor.throughput import Throughput
from launcher.monitor.timers import StepClock, Timers
from launcher.monitor.writers import OPENERS, Monitor, MonitorEvent, open_writers

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore
    from launcher.engine.flops import StepProfiler
    from launcher.models.activation import Checkpointer

REPORT_EVERY = 10  # steps between reports if steps_per_print is null
MEMORY_EVERY_S = 1.0
_OFF = nullcontext()


class Telemetry:
    """All measurements of an engine. They never affect the results, and cost nothing when disabled.

    Args:
        config: the resolved config.
        monitor: from `open_monitor`.
        checkpointer: the checkpointer of the blocks, which prints their times if configured.

    Attributes:
        timers: timers of the phases forward, backward, reduce and step.
        clock: the same phases for external monitoring (`launch top`); costs about a microsecond per phase.
        say: prints one or more lines; called on rank 0.
    """

    def __init__(
        self, config: Config, mesh: Mesh, monitor: Monitor, checkpointer: Checkpointer | None = None
    ) -> None:
        first, flops, comms = mesh.rank == 0, config.flops_profiler, config.comms_logger
        self.monitor, self._mesh, self._checkpointer = monitor, mesh, checkpointer
        self.say: Callable[[str], None] = _print
        self.timers = Timers(enabled=config.wall_clock_breakdown or flops.enabled, device=mesh.device)
        self.clock = StepClock(lambda: waits.seconds)
        self._held, self._looked_at = (0.0, 0.0), 0.0
        self.memory = MemoryBreakdown(mesh.device) if config.memory_breakdown and first else None
        self.profiler: StepProfiler | None = None
        if flops.enabled and first:
            from launcher.engine.flops import StepProfiler

            self.profiler = StepProfiler(flops)
        speed = config.timers.throughput
        self.throughput = Throughput(
            enabled=speed.enabled and config.steps_per_print is not None,
            synchronized=speed.synchronized,
            device=mesh.device,
        )
        self._loss: Tensor | None = None
        self._steps = 0  # since the last report
        self._batches: list[float] = []  # seconds of each train_batch() since its last report
        self._logs = bool(comms.enabled)
        if self._logs:
            start_log(operations=comms.operations, by_unit=comms.debug, verbose=comms.verbose)

    def phase(self, name: str, engine: EngineCore) -> AbstractContextManager[None]:
        """Return the context of a phase of a step: "forward" or "backward" of a microbatch, or "step"."""
        if name == "forward" and not torch.is_grad_enabled():
            return _OFF  # evaluation
        if self.throughput.enabled and name == "forward" and engine.module.training and not engine.quiet:
            self.throughput.start()
        if self.timers.enabled or self.memory is not None or self.profiler is not None:
            return self._phase(name, engine)
        return _OFF if recorder is None else self.clock.phase(name)

    @contextmanager
    def _phase(self, name: str, engine: EngineCore) -> Iterator[None]:
        with ExitStack() as stack:
            if self.profiler is not None:
                stack.enter_context(self.profiler.phase(name, engine))
            if self.timers.enabled and name == "backward":
                stack.enter_context(observe_collectives(self._waited))
            stack.enter_context(self.timers(name))
            stack.enter_context(self.clock.phase(name))
            yield
        if self.memory is not None and self._due(engine.global_steps + (name != "step"), engine):
            self.memory.mark(name)

    def _waited(self, timing: Timing) -> None:
        if timing.record.op in ("reduce_scatter", "all_reduce"):
            self.timers.add("reduce", timing.blocked)

    def loss(self, loss: Tensor, share: float) -> None:
        """Record the loss of a microbatch, with its weight in this rank's loss of the step."""
        if self.monitor.enabled:
            part = loss.detach().float() * share
            self._loss = part if self._loss is None else self._loss + part

    def forget(self) -> None:
        """Discard the losses since the last step."""
        self._loss = None

    def counted(self, engine: EngineCore, samples: int) -> None:
        """Record an optimizer step of `samples` sequences over all ranks; print DeepSpeed's line when due."""
        if self.throughput.enabled:
            self.throughput.stop(samples)
        if self._checkpointer is not None:
            self._checkpointer.steps += 1
        every = engine.steps_per_print()
        if not every or engine.global_steps % every or self._mesh.rank > 0:
            return
        self.flush_on_exit()
        if not engine.quiet:
            counts = f"step={engine.global_steps}, skipped={engine.skipped_steps}"
            say(f"{counts}, lr={engine.get_lr()}, mom={engine.get_mom()}")
            if self.throughput.line():
                say(self.throughput.line())

    @contextmanager
    def batch(self, engine: EngineCore) -> Iterator[list[Tensor]]:
        """Wrap `engine.train_batch()`, which appends its loss; print the progress line of DeepSpeed's
        pipeline engine when due."""
        began, losses = time.perf_counter(), list[Tensor]()
        yield losses
        every = engine.steps_per_print()
        if not every or engine.quiet or self._mesh.rank > 0:
            return
        due = engine.global_steps % every == 0
        loss = float(losses[0]) if due else 0.0  # synchronizes with the device
        self._batches.append(time.perf_counter() - began)
        if due:
            seconds = max(sum(self._batches) / len(self._batches), 1e-9)
            self._batches.clear()
            speed = f"iter time (s): {seconds:.3f} samples/sec: {engine.train_batch_size() / seconds:.3f}"
            say(f"steps: {engine.global_steps} loss: {loss:.4f} {speed}")

    def flush_on_exit(self) -> None:
        """Print the times of checkpointed blocks that have not been printed yet."""
        if self._checkpointer is not None and self._mesh.rank == 0:
            self._checkpointer.print_profile()

    def after_step(self, engine: EngineCore) -> None:
        """Update and report the measurements after an optimizer step that the engine has counted."""
        if recorder is not None:
            recorder.count(self._counters(engine))
        self._steps += 1
        if self.timers.enabled:
            self.timers.end_step()
        if self._logs:
            read_log()
        if self.monitor.enabled:
            self.monitor.write_events(list(self._events(engine)))
        if self.profiler is not None:
            self.profiler.after_step(engine, self.timers.last_step, self.say)
        if self._due(engine.global_steps, engine):
            self._report(engine)

    def _counters(self, engine: EngineCore) -> StepCounters:
        """Return the time and memory of this rank's steps, for external monitoring."""
        clock, saver, total = self.clock, engine.made_saver, self.clock.end_step()
        if (now := time.monotonic()) - self._looked_at > MEMORY_EVERY_S:
            device, self._looked_at = self._mesh.device, now
            self._held = float(current_memory_bytes(device)), float(peak_memory_bytes(device))
        waited = {f"{name}_wait": seconds for name, seconds in clock.waits.items()}
        return StepCounters(
            steps=engine.global_steps,
            samples=engine.global_samples,
            counted=clock.steps,
            total=total,
            memory=self._held[0],
            peak=self._held[1],
            checkpoint=0.0 if saver is None else saver.stalled_s,
            **clock.seconds,
            **waited,
        )

    def evaluated(self, engine: EngineCore, loss: float) -> None:
        """Write the mean loss of an evaluation to the monitors, named as in DeepSpeed's pipeline engine."""
        if self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", loss, engine.global_samples)])

    def _due(self, step: int, engine: EngineCore) -> bool:
        """Return whether a report is printed after optimizer step `step`."""
        return step % (engine.steps_per_print() or REPORT_EVERY) == 0

    def _report(self, engine: EngineCore) -> None:
        line = self.timers.line(self._steps) if self.timers.enabled else ""
        self._steps = 0
        if self._mesh.rank == 0 and line:
            self.say(f"step {engine.global_steps}: {line}")
        if self.memory is not None:
            for text in self.memory.lines(engine.held_bytes()):
                self.say(f"step {engine.global_steps}: {text}")

    def _events(self, engine: EngineCore) -> Iterator[MonitorEvent]:
        """Yield a step's monitor events, under DeepSpeed's names. Averaging the loss takes an all-reduce."""
        values: dict[str, Any] = {"train_loss": self._mean_loss()}
        values["lr"] = engine.get_lr()[0]
        values["grad_norm"] = engine.get_global_grad_norm()
        values["loss_scale"] = engine.loss_scale() if engine.fp16_enabled() else None
        if self.timers.enabled:
            values |= _deepspeed_times(self.timers.last_step)
        for name, value in values.items():
            if value is not None:
                yield f"Train/Samples/{name}", value, engine.global_samples

    def _mean_loss(self) -> float | None:
        """Return the mean loss over dp, or None if no loss was passed to engine.backward()."""
        mine = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        if self._loss is not None:
            mine[0], mine[1] = self._loss, 1.0
        self._loss = None
        all_reduce(mine, self._mesh.dp, "root/monitor").wait()
        total, count = mine.tolist()
        return total / count if count else None

    def close(self) -> None:
        """Close the monitors and stop the log of collectives."""
        self.flush_on_exit()
        self.monitor.close()
        if self._logs:
            stop_log()


def _deepspeed_times(phases: dict[str, float]) -> dict[str, float]:
    """Return the phase times in milliseconds under DeepSpeed's names."""
    reduce, backward = phases.get("reduce", 0.0), phases.get("backward", 0.0)
    return {
        "elapsed_time_ms_forward": phases.get("forward", 0.0),
        "elapsed_time_ms_backward": backward,
        "elapsed_time_ms_backward_inner": backward - reduce,
        "elapsed_time_ms_backward_allreduce": reduce,
        "elapsed_time_ms_step": phases.get("step", 0.0),
    }


def open_monitor(config: Config, mesh: Mesh) -> Monitor:
    """Open the configured monitors on rank 0, of the first replica if there are several.

    Raises:
        ConfigError: on every rank: a package is missing, or a directory cannot be created.
    """
    sections = {name: getattr(config, name).to_dict() for name in OPENERS if getattr(config, name).enabled}
    if not sections:
        return Monitor()
    from launcher.replica import replica_of

    writers, problem = [], None
    if mesh.rank == replica_of()[0] == 0:
        try:
            writers = open_writers(sections)
        except ConfigError as error:
            problem = (error.what, error.where, error.fix)
    if (told := broadcast_from_first(problem) if mesh.world_size > 1 else problem) is not None:
        what, where, fix = told
        raise ConfigError(what, where=where, fix=fix)
    return Monitor(writers, enabled=True)


def _print(text: str) -> None:
    print(text, flush=True)
