"""`deepspeed.profiling.flops_profiler`: FLOPs and time of a model's forward, without an engine.

FLOPs are computed with torch's formulas for the executed operators, as in the `flops_profiler` section; a
multiply-add counts as two.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.errors import LauncherError
from launcher.monitor.flops import ModuleMeter

SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3))


class FlopsProfiler:
    """Counts and times the forwards of a model between `start_profile` and `stop_profile`.

    Args:
        model: any module.
        ds_engine: unused.
        recompute_fwd_factor: fraction of the forward that is recomputed in the backward; unused, as it is
            measured.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.started = model, False
        self._meter = ModuleMeter(model, _device_of(model))
        self._inside = ExitStack()
        self._seconds = 0.0

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Start counting and timing.

        Args:
            ignore_list: must be empty: module classes cannot be excluded.
        """
        if ignore_list:
            raise LauncherError("ignore_list is not supported: no module can be excluded", fix="omit it")
        self.reset_profile()
        self._inside.enter_context(self._meter.counting(backward=False))
        self._inside.enter_context(self._meter.timing())
        self.started, self._began = True, time.perf_counter()

    def stop_profile(self) -> None:
        if self.started:
            self._inside.close()
            self._seconds, self.started = time.perf_counter() - self._began, False

    def reset_profile(self) -> None:
        self._inside.close()
        self._meter = ModuleMeter(self.model, _device_of(self.model))
        self._seconds, self.started = 0.0, False

    def end_profile(self) -> None:
        """Discard the measurements."""
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        flops = self._meter.counts.flops.get("", 0)
        return flops_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        macs = self._meter.counts.flops.get("", 0) // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        seconds = self._meter.counts.seconds.get("", self._seconds)
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        params = sum(param.numel() for param in self.model.parameters())
        return params_to_string(params) if as_string else params

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        return False

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals and a line for each module, or write them to a file."""
        lines = [
            f"profile of step {profile_step}: {self.get_total_params(True)} parameters, "
            f"{self.get_total_flops(True)} per forward, {self.get_total_duration(True)}"
        ]
        lines += self._modules(module_depth) if detailed else []
        if output_file is None:
            print(*lines, sep="\n")
            return
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the modules with the most FLOPs at each depth."""
        by_depth: dict[int, list[tuple[int, str]]] = {}
        for name, flops in self._meter.counts.flops.items():
            by_depth.setdefault(name.count(".") + 1 if name else 0, []).append((flops, name))
        for depth, found in sorted(by_depth.items()):
            if module_depth in (-1, depth):
                most = ", ".join(
                    f"{name or 'model'} {flops_to_string(n)}" for n, name in sorted(found)[::-1][:top_modules]
                )
                print(f"depth {depth}: {most}")

    def _modules(self, depth: int) -> list[str]:
        counts = self._meter.counts
        lines = []
        for name, module in self.model.named_modules():
            level = name.count(".") + 1 if name else 0
            if depth in (-1, level) or level < depth:
                flops, seconds = counts.flops.get(name, 0), counts.seconds.get(name, 0.0)
                lines.append(
                    f"{'  ' * level}{name or 'model'} ({type(module).__name__}): "
                    f"{flops_to_string(flops)}, {duration_to_string(seconds)}"
                )
        return lines


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return (FLOPs, MACs, parameters) of one forward.

    Args:
        input_shape: shape of a single random input tensor; if None, args and kwargs are the inputs.
        warm_up: number of forwards before the profiled one.
        mode: "forward", or "generate".
    """
    if input_shape is not None:
        args = [torch.randn(input_shape, device=_device_of(model))]
    call = model.generate if mode == "generate" else model
    kwargs = kwargs or {}
    model.eval()
    with torch.no_grad():
        for _ in range(warm_up):
            call(*args, **kwargs)  # type: ignore[operator]
        profiler = FlopsProfiler(model)
        profiler.start_profile(ignore_modules)
        call(*args, **kwargs)  # type: ignore[operator]
        profiler.stop_profile()
    flops, macs, params = (
        profiler.get_total_flops(),
        profiler.get_total_macs(),
        profiler.get_total_params(),
    )
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    if as_string:
        return number_to_string(flops), macs_to_string(macs), params_to_string(params)
    return flops, macs, params


def _device_of(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number with the suffix K, M, G or T."""
    scales = {**{name: scale for name, scale in SCALES}, "": 1.0, "m": 1e-3, "u": 1e-6}
    if units is None:
        units = next((name for name, scale in SCALES if num >= scale), "")
        if units == "" and 0 < num < 1:
            units = "m" if num >= 1e-3 else "u"
    return f"{round(num / scales[units], precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    units = units and units.removesuffix("FLOPS")
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    units = units and units.removesuffix("MACs")
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    units = units and units.removesuffix("B")
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    return (
        number_to_string(params_num, units and units.replace("B", "G"), precision).strip().replace("G", "B")
    )


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    units = units and units.removesuffix("s")
    if not units:
        units = "" if duration >= 1 else "m" if duration >= 1e-3 else "u"
    return f"{number_to_string(duration, units, precision)}s"
