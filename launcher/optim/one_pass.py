"""An optimizer step in one pass over host memory: gradients of any dtype in, 16-bit parameters out.

Tile by tile, a gradient is cast into a scratch buffer that stays in cache, torch's fused kernel steps the
tile, and the new weights are cast into the parameter while they are still in cache: every tensor crosses the
memory bus once. Nothing is compiled unless requested (`compiled.py`). The state has the same names, shapes
and values as in torch.optim's fused classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW

from launcher.offload.tier import memory
from launcher.optim.elementwise import Lion, UncorrectedAdam, UncorrectedAdamW

TILE = 2**19
"""Elements of a tile; its fp32 scratch buffer takes 2 MiB. Smaller tiles cost more Python overhead and
synchronisation of torch's threads (three times a tile); larger ones do not fit into the cache. The fastest
size measured, with one thread and with two."""

Kernel = Callable[[dict[str, Any], Tensor | None], Callable[["Tile"], None]]
"""(param group, divisor of the gradients or None) -> the function that steps a tile."""


@dataclass
class FusedSlice:
    """A slice to step: a part of one parameter. All tensors are 1-D, contiguous, of one length, in host
    memory.

    Args:
        weights: the master weights; updated in place.
        grad: the gradient, in any floating dtype; overwritten.
        state: the optimizer state of this slice; {} before the first step. Filled and updated.
        param: receives the new weights in its own dtype; None: not needed.
        zeros: allocates missing state: (name, dtype) -> zeros like the weights; default: new memory.
    """

    weights: Tensor
    grad: Tensor
    state: dict[str, Any]
    param: Tensor | None = None
    zeros: Callable[[str, torch.dtype], Tensor] | None = None


@dataclass
class Tile:
    """Parts of slices that are stepped by one kernel call.

    Args:
        weights, grads: in their own dtype and, inside the kernel, in the dtype of the arithmetic.
        params: see `FusedSlice.param`.
        states: name -> one tensor per part.
        steps: the step counter of each part; empty if the optimizer has no step counter.
        first: the state was created in this step.
    """

    first: bool
    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    params: list[Tensor | None] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: list[Tensor] = field(default_factory=list)
    numel: int = 0


@dataclass(frozen=True)
class FusedRule:
    """How to step one type of optimizer.

    Args:
        states: returns the names of its elementwise states for a param group.
        counts: it has a step counter.
        kernel: creates the function that steps a tile in one dtype; called once per step, because tiles take
            only about 100 us each.
        scales: the kernel divides the gradients by the divisor; otherwise they are multiplied beforehand.
        passes_once: the kernel makes a single pass over memory, so slices that need no cast need no tiles.
        corrects: false: no bias correction (the step counter is infinity).
        decoupled: weight decay is AdamW's; None: not an Adam rule, never compiled.
    """

    states: Callable[[dict[str, Any]], tuple[str, ...]]
    kernel: Kernel
    counts: bool = True
    scales: bool = True
    passes_once: bool = True
    corrects: bool = True
    decoupled: bool | None = None


def _adam(function: Any, group: dict[str, Any], divisor: Tensor | None) -> Callable[[Tile], None]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    options = {key: group[key] for key in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
    kernel = partial(function, **options, beta1=beta1, beta2=beta2, grad_scale=divisor, found_inf=None)

    def step(tile: Tile) -> None:
        states, most = tile.states, tile.states.get("max_exp_avg_sq", [])
        kernel(tile.weights, tile.grads, states["exp_avg"], states["exp_avg_sq"], most, tile.steps)

    return step


def _adagrad(group: dict[str, Any], divisor: Tensor | None) -> Callable[[Tile], None]:
    options = {key: group[key] for key in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
    kernel = partial(torch._fused_adagrad_, **options, grad_scale=divisor, found_inf=None)
    return lambda tile: kernel(tile.weights, tile.grads, tile.states["sum"], tile.steps)


def _sgd(group: dict[str, Any], divisor: Tensor | None) -> Callable[[Tile], None]:
    keys = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    options = {key: group[key] for key in keys}
    kernel = partial(torch._fused_sgd_, **options, grad_scale=divisor, found_inf=None)

    def step(tile: Tile) -> None:
        kernel(tile.weights, tile.grads, tile.states.get("momentum_buffer", []), is_first_step=tile.first)

    return step


def _lion(group: dict[str, Any], divisor: Tensor | None) -> Callable[[Tile], None]:
    return lambda tile: Lion.update(group, tile.weights, tile.grads, tile.states["exp_avg"])


def _moments(group: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


ADAM = FusedRule(_moments, partial(_adam, torch._fused_adam_), decoupled=False)
ADAMW = FusedRule(_moments, partial(_adam, torch._fused_adamw_), decoupled=True)
RULES: dict[type, FusedRule] = {
    Adam: ADAM,
    AdamW: ADAMW,
    UncorrectedAdam: replace(ADAM, corrects=False),
    UncorrectedAdamW: replace(ADAMW, corrects=False),
    Adagrad: FusedRule(lambda group: ("sum",), _adagrad),
    SGD: FusedRule(lambda group: ("momentum_buffer",) if group["momentum"] else (), _sgd, counts=False),
    Lion: FusedRule(lambda group: ("exp_avg",), _lion, counts=False, scales=False, passes_once=False),
}


def rule_of(optimizer: torch.optim.Optimizer) -> FusedRule | None:
    """Return the rule that replaces `optimizer.step()`, or None if that must be called: its class is unknown,
    it does not use torch's fused kernels, or the call was hooked or replaced (except by torch's schedulers,
    which only record it). A class may declare that it `steps_as` another one."""
    kind = getattr(optimizer, "steps_as", type(optimizer))
    rule, replaced = RULES.get(kind), vars(optimizer).get("step")
    replaced = getattr(replaced, "stands_for", replaced)
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if rule is None or hooked or (replaced and not hasattr(replaced, "_wrapped_by_lr_sched")):
        return None
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return rule if fused or kind is Lion else None


@torch.no_grad()
def step(
    rule: FusedRule,
    group: dict[str, Any],
    slices: Sequence[FusedSlice],
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    compiles: bool = False,
) -> None:
    """Step slices of one param group with all of torch's threads.

    Args:
        group: the options of the optimizer's param group.
        scale: factor on all gradients.
        dtype: the dtype of the arithmetic and of new state.
        compiles: step slices that need a cast with a compiled loop, if one exists.
    """
    multiply = scale if scale != 1.0 and (scale == 0.0 or not rule.scales) else None
    divisor = torch.full((), 1 / scale) if scale != 1.0 and multiply is None else None
    work = partial(_step_tile, rule.kernel(group, divisor), multiply, dtype)
    first = [_begin(rule, group, item, dtype) for item in slices]
    pairs = [(item, new) for item, new in zip(slices, first, strict=True) if item.weights.numel()]
    whole = [pair for pair in pairs if rule.passes_once and _needs_no_cast(pair[0], dtype)]
    for tile in _tiles(rule, group, whole, 2**62):
        work(tile)
    cut = [pair for pair in pairs if not (rule.passes_once and _needs_no_cast(pair[0], dtype))]
    if compiles and rule.decoupled is not None and not group["amsgrad"]:
        from launcher.optim import compiled

        if loop := compiled.loop():
            cut = [pair for pair in cut if not compiled.step(loop, rule, group, pair[0], scale)]
    for tile in _tiles(rule, group, cut, TILE):
        work(tile)


def _needs_no_cast(item: FusedSlice, dtype: torch.dtype) -> bool:
    return item.param is None and item.grad.dtype == item.weights.dtype == dtype


def _begin(rule: FusedRule, group: dict[str, Any], item: FusedSlice, dtype: torch.dtype) -> bool:
    """Create missing state and increment the step counter; return whether state was created."""
    state, first = item.state, False
    for name in rule.states(group):
        if state.get(name) is None:
            state[name] = (item.zeros or partial(_zeros, item.weights))(name, dtype)
            first = True
    if rule.counts:
        counter = state.setdefault("step", torch.zeros((), dtype=torch.float32))
        counter.add_(1) if rule.corrects else counter.fill_(torch.inf)
    return first


def _zeros(like: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return memory(like.numel(), dtype, like.device).zero_()


def _tiles(
    rule: FusedRule, group: dict[str, Any], items: Iterable[tuple[FusedSlice, bool]], size: int
) -> Iterator[Tile]:
    """Split large slices and join small ones. Slices are cut at multiples of `size`, which is a multiple of
    the kernels' vector width, so every element is computed by the same instructions as in an uncut slice."""
    tile = Tile(first=False)
    for item, first in items:
        names = rule.states(group)
        columns = [item.weights, item.grad, *(item.state[name] for name in names)]
        cut = partial(_pieces, size)
        params = (None,) * -(-item.weights.numel() // size) if item.param is None else cut(item.param)
        for (weights, grad, *states), param in zip(zip(*map(cut, columns), strict=True), params, strict=True):
            if tile.numel and (tile.numel + weights.numel() > size or tile.first != first):
                yield tile
                tile = Tile(first)
            tile.first = first
            tile.weights.append(weights)
            tile.grads.append(grad)
            tile.params.append(param)
            for name, state in zip(names, states, strict=True):
                tile.states.setdefault(name, []).append(state)
            if rule.counts:
                tile.steps.append(item.state["step"])
            tile.numel += weights.numel()
    if tile.numel:
        yield tile


def _pieces(size: int, tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor. One that fits is not split: for small models, the calls would cost more than their arithmetic."""
    return tensor.split(size) if tensor.numel() > size else (tensor,)


def _step_tile(
    kernel: Callable[[Tile], None], multiply: float | None, dtype: torch.dtype, tile: Tile
) -> None:
    held = tile.weights
    tile.grads = _cast(tile.grads, dtype, place=0)
    tile.weights = _cast(held, dtype, place=1)
    if multiply is not None:
        torch._foreach_mul_(tile.grads, multiply)
    kernel(tile)
    for stepped, weights, param in zip(tile.weights, held, tile.params, strict=True):
        if weights is not stepped:
            weights.copy_(stepped)
        if param is not None:
            param.copy_(stepped)


_scratch: dict[str, Tensor] = {}


def _cast(tensors: list[Tensor], dtype: torch.dtype, place: int) -> list[Tensor]:
    """Return the tensors in `dtype`, using scratch buffer number `place` for those with another dtype."""
    for tensor in tensors:
        if tensor.dtype != dtype:
            break
    else:
        return tensors
    key = f"{dtype} {place}"
    if key not in _scratch:
        _scratch[key] = memory(TILE, dtype, tensor.device)
    if len(tensors) == 1:
        return [_scratch[key][: tensor.numel()].copy_(tensor)]
    parts = _scratch[key][: sum(tensor.numel() for tensor in tensors)].split([t.numel() for t in tensors])
    return [
        tensor if tensor.dtype == dtype else part.copy_(tensor)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
