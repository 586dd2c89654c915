"""Counts floating-point operations and time, module by module (`flops_profiler`).

    count   each operation by torch's formulas (torch.utils.flop_counter), in forward and backward; a module's
            share is the difference over its forward
    time    device time at the start and the end of each module's forward

Counting slows every operation down, so counts and times are taken in different steps. Forwards that run
inside a backward belong to activation checkpointing and count as recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from launcher.monitor.clock import Moment, now, seconds_between


@dataclass
class Counts:
    """The counts, summed over the microbatches of a step.

    Attributes:
        flops, seconds: module name -> totals of its forward, including submodules; "" is the model.
        backward: FLOPs of the backward, including recomputed forwards.
        recomputed: the part of `backward` in recomputed forwards.
    """

    flops: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    backward: int = 0
    recomputed: int = 0


class ModuleMeter:
    """Measures the modules of a model inside `counting` or `timing`; no hooks are registered otherwise.

    Args:
        model: any nn.Module.
        device: the device of the model.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.counts = Counts()
        self._model, self._device = model, device

    @contextmanager
    def counting(self, *, backward: bool) -> Iterator[None]:
        """Count the operations inside the context, which are those of a forward or a backward."""
        mode = _Counting()
        inside = 0  # nesting depth of recomputed forwards

        def enter(name: str) -> int:
            nonlocal inside
            inside += backward
            return mode.flops

        def leave(name: str, began: int) -> None:
            nonlocal inside
            spent = mode.flops - began
            if not backward:
                self.counts.flops[name] = self.counts.flops.get(name, 0) + spent
                return
            inside -= 1
            if inside == 0:
                self.counts.recomputed += spent

        with self._hooks(enter, leave, list(self._model.named_modules())), mode:
            yield
        if backward:
            self.counts.backward += mode.flops

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the modules' forwards inside the context, which contains one forward of the model."""

        spans: list[tuple[str, Moment, Moment]] = []

        def leave(name: str, began: Moment) -> None:
            spans.append((name, began, now(self._device)))

        with self._hooks(lambda name: now(self._device), leave, _outside_of_graphs(self._model)):
            yield
        for name, began, ended in spans:
            self.counts.seconds[name] = self.counts.seconds.get(name, 0.0) + seconds_between(began, ended)

    @contextmanager
    def _hooks(
        self,
        enter: Callable[[str], Any],
        leave: Callable[[str, Any], None],
        modules: list[tuple[str, nn.Module]],
    ) -> Iterator[None]:
        """Call enter(name) before and leave(name, result of enter) after each forward of each module."""
        handles = []
        for name, module in modules:
            stack: list[Any] = []

            def before(module: nn.Module, args: Any, name: str = name, stack: list[Any] = stack) -> None:
                stack.append(enter(name))

            def after(
                module: nn.Module, args: Any, out: Any, name: str = name, stack: list[Any] = stack
            ) -> None:
                if stack:
                    leave(name, stack.pop())

            # Runs last before the forward and first after it, so that gathering parameters is not included.
            handles.append(module.register_forward_pre_hook(before))
            # always_call: activation checkpointing aborts a recomputed forward with an exception as soon as
            # it has all saved tensors.
            handles.append(module.register_forward_hook(after, prepend=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _outside_of_graphs(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules outside other modules' compiled graphs; hooks inside would cause recompilation."""
    found: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer + ".") for outer in compiled):
            continue
        found.append((name, module))
        if hasattr(module.forward, "_torchdynamo_orig_callable"):
            compiled.append(name)
    return found


class _Counting(TorchDispatchMode):
    """Counts FLOPs without changing results; FlopCounterMode decomposes some operations (SiLU's backward)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_attention_on_cpus()).flop_registry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


def _attention_on_cpus() -> dict[Any, Any]:
    """Return the formulas that FlopCounterMode of torch 2.13 lacks: scaled dot-product attention on CPUs.

    q [b, h, s, d], k [b, _, t, d], v [b, _, t, e]: QK^T and PV; backward: QK^T again, dV, dP, dQ, dK.
    """
    found: dict[Any, Any] = {}
    forward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    if forward is not None:
        found[forward] = lambda q, k, v, *_, **__: 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])
    if backward is not None:
        found[backward] = lambda g, q, k, v, *_, **__: 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])
    return found
