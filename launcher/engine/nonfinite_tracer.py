"""The search for the source of a non-finite gradient, made once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from launcher.comm.plain import gather_plain
from launcher.zero.features.overflow import find_overflows, in_words

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore


class NonFiniteTracer:
    """Stores the inputs needed to rerun a forward, and reports the first non-finite output once.

    Steps with a finite gradient cost nothing: the others are detected by the norm, which is computed anyway.

    Attributes:
        looks: True until a report was made.
        inputs: inputs of the last forward of the current step; set by the engine.
    """

    def __init__(self) -> None:
        self.looks = True
        self.inputs: tuple[Any, Any] | None = None

    def tell(self, engine: EngineCore, *, skipped: bool) -> None:
        """Report the first non-finite output: every rank reruns the last microbatch with the weights before
        the step.

        Every rank must call it, after the reduction and before the optimizer steps.

        Args:
            skipped: whether the optimizer will skip this step.
        """
        if not self.looks:
            return
        self.looks = False
        stepped_already = engine.optimizer is not None and bool(engine.optimizer.early)
        module = None if stepped_already else self._first_module(engine)
        found = {rank: name for rank, name in enumerate(gather_plain(module)) if name is not None}
        if found:
            rank, name = next(iter(found.items()))
            where = f"The first module with a non-finite output, on rank {rank}, is {name}."
        elif stepped_already:
            where = (
                "The module cannot be determined because the weights have already been updated; set "
                "gradient_clipping above 0 to find it."
            )
        else:
            which = in_words(find_overflows(engine.zero))
            again = (
                ""
                if self.inputs is None
                else "All outputs were finite when the last microbatch was run again. "
            )
            where = f"{again}Non-finite gradients, in backward order: {which or 'on another stage'}."
        if engine.mesh.rank == 0:
            so = "the step is skipped" if skipped else "the step makes the weights non-finite"
            what = f"step {engine.global_steps + 1}: the gradient is not finite, and {so}."
            engine.telemetry.say(f"warning: {what} {where} This is reported once.")
        self.inputs = None

    def _first_module(self, engine: EngineCore) -> str | None:
        if self.inputs is None:
            return None
        args, kwargs = tree_map_only(Tensor, Tensor.detach, self.inputs)
        first: list[str] = []
        with torch.no_grad(), _as_before(engine), _watched(engine.module, first.append):
            engine.module(*args, **kwargs)
        return first[0] if first else None


@contextmanager
def _watched(module: nn.Module, found: Callable[[str], None]) -> Iterator[None]:
    """Report the names of modules with non-finite outputs, submodules before their parents."""

    def hook(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _args: Any, output: Any) -> None:
            if not all(finite(leaf) for leaf in tree_leaves(output)):
                found(name or "the model")

        return look

    handles = [part.register_forward_hook(hook(name)) for name, part in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _as_before(engine: EngineCore) -> Iterator[None]:
    """Restore the random state and the buffers on exit."""
    devices = [engine.device] if engine.device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
    with torch.random.fork_rng(devices), engine.autocasting():
        yield
    for buffer, was in buffers:
        buffer.copy_(was)


def finite(value: Any) -> bool:
    """Return False if the value is a tensor with a non-finite element."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return True
    return all(bool(end.isfinite()) for end in torch.aminmax(value.detach()))


def weights_are_finite(engine: EngineCore) -> bool:
    """Return whether the trained weights are finite on all ranks. Every rank must call it."""
    good = True
    for gradient in engine.zero.gradients:
        flat = gradient.flat
        good = good and finite(flat.master) and finite(flat.shard)
        flat.rest()
    told = torch.tensor(float(good))
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told)
