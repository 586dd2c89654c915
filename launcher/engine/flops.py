"""`flops_profiler`: selects the steps in which to count FLOPs and time modules, and writes the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from launcher.config import FlopsProfilerConfig
from launcher.monitor.devices import peak_flops
from launcher.monitor.flops import ModuleMeter
from launcher.monitor.flops_report import StepFacts, report

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore


class StepProfiler:
    """Counts FLOPs in the step before `profile_step`, and times modules and reports in that step.

    If there is no previous step (profile_step 0, or the run began there), both are done in one step. Other
    steps are not affected.
    """

    def __init__(self, config: FlopsProfilerConfig) -> None:
        self._config = config
        self._meter: ModuleMeter | None = None
        self._counted_in: int | None = None

    @contextmanager
    def phase(self, name: str, engine: EngineCore) -> Iterator[None]:
        """Wrap the forward and the backward of each microbatch."""
        step, wanted = engine.global_steps, int(self._config.profile_step)
        if name == "step" or not wanted - 1 <= step <= wanted:
            yield
            return
        if self._meter is None:
            self._meter, self._counted_in = ModuleMeter(engine.module, engine.device), step
        with (
            self._meter.counting(backward=name == "backward") if step == self._counted_in else nullcontext(),
            self._meter.timing() if step == wanted and name == "forward" else nullcontext(),
        ):
            yield

    def after_step(
        self, engine: EngineCore, phases_ms: Mapping[str, float], say: Callable[[str], None]
    ) -> None:
        """Report after the profiled step."""
        step = engine.global_steps - 1
        if step != self._config.profile_step or self._meter is None or self._counted_in is None:
            return
        device = engine.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        facts = StepFacts(
            step=step,
            counted_in=self._counted_in,
            ranks=engine.world_size,
            dp_ranks=engine.dp_world_size,
            microbatch=engine.train_micro_batch_size_per_gpu(),
            accumulation=engine.gradient_accumulation_steps(),
            phases_ms=phases_ms,
            device=name,
            peak=peak_flops(name),
        )
        text = report(
            self._meter.counts,
            {name: slot.logical_numel for name, slot in engine.zero.slots.items()},
            {name: type(module).__name__ for name, module in engine.module.named_modules()},
            facts,
            module_depth=self._config.module_depth,
            top_modules=int(self._config.top_modules),
            detailed=self._config.detailed,
        )
        self._meter = None
        self._write(text, say)

    def _write(self, text: str, say: Callable[[str], None]) -> None:
        if not self._config.output_file:
            say(text)
            return
        path = Path(self._config.output_file).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
