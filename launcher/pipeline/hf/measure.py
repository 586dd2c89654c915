"""Measures forward and backward of each part of a Hugging Face model separately.

The model runs its own forward on one microbatch, so parts receive the same arguments as in training, masks
and positions included. A part is materialised only while it runs: a model on meta needs the memory of its
largest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import nn

from launcher.pipeline.hf.costs import LayerCosts
from launcher.pipeline.hf.parts import parts_of
from launcher.pipeline.partition.measure import LOSS, ROUNDS, MeasureOptions, PartClock, on_device, set_up


def measure_model(model: nn.Module, batch: Mapping[str, Any], way: MeasureOptions) -> LayerCosts:
    """Return the seconds of one microbatch, forward and backward.

    Args:
        model: a Hugging Face causal LM, on meta or not; its parameters and buffers are restored afterwards.
            If its layers are split over tensor-parallel ranks, all of these must call this function.
        batch: one microbatch with labels, on the device. The time of the loss is added to that after the
            blocks.
    """
    parts, clock = parts_of(model), PartClock(way.device)
    inside = {inner for part in parts for _, module in part for inner in module.modules()}
    around = [(name, module) for name, module in model.named_modules() if module not in inside]
    with ExitStack() as stack:
        stack.enter_context(set_up(way))
        stack.enter_context(on_device(around, way))
        for name, module in (named for part in parts for named in part):
            stack.enter_context(_replaced(module, "forward", _timed(name, module, clock, way)))
        loss = getattr(model, "loss_function", None)
        if loss is not None:
            timed = wraps(loss)(lambda *args, **kwargs: clock.run(LOSS, loss, *args, **kwargs))
            stack.enter_context(_replaced(model, "loss_function", timed))
        for _ in range(ROUNDS):
            clock.start_round()
            model(**batch)
    before, blocks, after = ([name for name, _ in part] for part in parts)
    return LayerCosts(
        sum(map(clock.seconds, before)),
        tuple(clock.seconds(name, again=way.recomputed) for name in blocks),
        sum(map(clock.seconds, [*after, LOSS])),
    )


def _timed(name: str, module: nn.Module, clock: PartClock, way: MeasureOptions) -> Callable[..., Any]:
    forward = module.forward

    @wraps(forward)  # transformers inspects the signature
    def timed(*args: Any, **kwargs: Any) -> Any:
        with on_device(module.named_modules(prefix=name), way):
            return clock.run(name, forward, *args, **kwargs)

    return timed


@contextmanager
def _replaced(owner: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object inside the context."""
    before = dict(vars(owner))
    setattr(owner, name, value)
    try:
        yield
    finally:
        # A property may store the value under another name.
        for key in [key for key in vars(owner) if key not in before or vars(owner)[key] is not before[key]]:
            if key in before:
                vars(owner)[key] = before[key]
            else:
                del vars(owner)[key]
