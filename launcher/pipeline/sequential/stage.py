"""The layers of one stage of a `PipelineModule`: how each runs, and which are recomputed together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from launcher import checkpointing


class LayerCall(NamedTuple):
    """The call of a layer: module(inputs), function(module, inputs) or function(inputs), by module name."""

    module: str | None
    function: Callable[..., Any] | None


class PipelineStage(nn.Module):
    """Consecutive layers. Its forward takes the output of the layer before the first one.

    Args:
        modules: name -> module; tied layers run the same module.
        calls: the call of each layer.
        interval, checkpoint, checkpointable: see the activation checkpointing arguments of PipelineModule.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        calls: tuple[LayerCall, ...],
        *,
        interval: int = 0,
        checkpoint: Callable[..., Any] | None = None,
        checkpointable: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.calls, self.interval, self.checkpointable = calls, interval, checkpointable
        self._checkpoint = checkpoint or checkpointing.checkpoint
        self._own = checkpoint is not None

    def recompute_by(self, run: Callable[..., Any]) -> None:
        """Recompute with run(name, function, *inputs), unless the user passed a function for it."""
        if not self._own:
            self._checkpoint = partial(run, "layers")

    def forward(self, inputs: Any) -> Any:
        if not self.interval or not torch.is_grad_enabled():
            return self._run(self.calls, inputs)
        for begin in range(0, len(self.calls), self.interval):
            calls = self.calls[begin : begin + self.interval]
            inputs = (
                self._recomputed(calls, inputs) if self._may_recompute(calls) else self._run(calls, inputs)
            )
        return inputs

    def _run(self, calls: tuple[LayerCall, ...], inputs: Any) -> Any:
        for name, function in calls:
            module = None if name is None else self.get_submodule(name)
            if function is None:
                assert module is not None
                inputs = module(inputs)
            else:
                inputs = function(inputs) if module is None else function(module, inputs)
        return inputs

    def _recomputed(self, calls: tuple[LayerCall, ...], inputs: Any) -> Any:
        def layers(*given: Any) -> Any:
            return self._run(calls, given if isinstance(inputs, tuple) else given[0])

        return self._checkpoint(layers, *(inputs if isinstance(inputs, tuple) else (inputs,)))

    def _may_recompute(self, calls: tuple[LayerCall, ...]) -> bool:
        """Return whether to recompute these layers: all are of the named classes, or any has parameters."""
        modules = [self.get_submodule(name) for name, _ in calls if name is not None]
        if self.checkpointable is None:
            return any(True for module in modules for _ in module.parameters())
        return len(modules) == len(calls) and all(type(m).__name__ in self.checkpointable for m in modules)
