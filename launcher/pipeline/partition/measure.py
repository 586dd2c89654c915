"""Measures forward and backward of single parts of a model: `"partition": "profile"`.

The time of ZeRO and of transfers between stages is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from launcher.monitor.clock import now, seconds_between
from launcher.pipeline.seeding import drawn_from
from launcher.tensor.split_model import loss_only

ROUNDS, REPEATS = 5, 2
"""Passes over all parts, and runs of each part per pass. The fastest run counts: other load on the machine
only adds time, mostly to all runs close in time."""
LOSS = "loss"


@dataclass(frozen=True)
class MeasureOptions:
    """The settings of the run that affect the speed of a part.

    Args:
        dtype: dtype of floating-point parameters.
        special: parameter names -> their dtypes, where these differ from `dtype`.
        autocast: the dtype of torch.autocast; None: off.
        recomputed: blocks, or layers with parameters, are recomputed in backward.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    special: Mapping[str, torch.dtype] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    recomputed: bool = False


class PartClock:
    """Measures forward and backward of functions of tensors, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rounds: list[dict[str, tuple[float, float]]] = []  # name -> seconds of forward, of backward

    def start_round(self) -> None:
        """Start another pass over the same parts; the fastest pass counts."""
        self._rounds.append({})

    def run(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Time `call`, and return its output, detached. Times under one name in a round are summed."""
        forward = backward = float("inf")
        output = None
        for _ in range(REPEATS):
            own_args, own_kwargs = _cut_off((args, kwargs))
            begin = now(self.device)
            output = call(*own_args, **own_kwargs)
            end = now(self.device)
            roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            gradients = [torch.ones_like(root) for root in roots]
            back = now(self.device)
            if roots:
                torch.autograd.backward(roots, gradients)
            over = now(self.device)
            forward = min(forward, seconds_between(begin, end))
            backward = min(backward, seconds_between(back, over))
        before = self._rounds[-1].get(name, (0.0, 0.0))
        self._rounds[-1][name] = before[0] + forward, before[1] + backward
        return _cut_off(output)

    def seconds(self, name: str, *, again: bool = False) -> float:
        """Return the seconds of forward plus backward; 0 if the part never ran.

        Args:
            again: count the forward twice, for recomputation.
        """
        forward, backward = (
            min(times) for times in zip(*(r.get(name, (0.0, 0.0)) for r in self._rounds), strict=True)
        )
        return (2 if again else 1) * forward + backward


def _cut_off(value: Any) -> Any:
    """Return copies of the tensors, detached from their graph. Copies that require a gradient are not leaves,
    because the timed code may modify its arguments in place."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad).clone(), value)


@contextmanager
def set_up(way: MeasureOptions) -> Iterator[None]:
    """Enable autograd and autocast as in training; restore the random state on exit."""
    autocast = torch.autocast(way.device.type, way.autocast) if way.autocast else nullcontext()
    with drawn_from(0), torch.enable_grad(), autocast, loss_only():
        yield


@contextmanager
def on_device(modules: Iterable[tuple[str, nn.Module]], way: MeasureOptions) -> Iterator[None]:
    """Place the modules' own parameters, in the run's dtype, and buffers on the device inside the context."""
    kept = []
    try:
        for name, module in modules:
            parameters, buffers = dict(module._parameters), dict(module._buffers)
            kept.append((module, parameters, buffers))
            for key, parameter in parameters.items():
                if parameter is not None:
                    dtype = way.special.get(f"{name}.{key}" if name else key, way.dtype)
                    value = _value(parameter, way.device, dtype)
                    module._parameters[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            for key, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[key] = _value(buffer, way.device, buffer.dtype).clone()
        yield
    finally:
        for module, parameters, buffers in kept:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _value(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the values of a tensor; for one on meta, values that preserve scales and let routers choose
    evenly."""
    if not tensor.is_floating_point():
        dtype = tensor.dtype
    if not tensor.is_meta:
        return tensor.detach().to(device, dtype)
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, device=device, dtype=dtype)
    if tensor.dim() < 2:
        return torch.ones(tensor.shape, device=device, dtype=dtype)
    return torch.empty(tensor.shape, device=device, dtype=dtype).normal_(0, 0.02)
