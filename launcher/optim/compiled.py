"""Adam's step of a 16-bit gradient and parameter as one loop that torch.compile makes, where the JSON's `compile` asks
for it: nothing is cast into a buffer on the way. Its numbers are those of torch's fused kernels to about 1e-6: it
multiplies with reciprocals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from launcher.optim.one_pass import FusedRule, FusedSlice

logger = logging.getLogger("launcher")
SMALLEST = 2**18
"""Elements of a slice: a call takes as long as some 100,000 of them."""


def update(
    weights: Tensor, grad: Tensor, mean: Tensor, square: Tensor, param: Tensor, numbers: Tensor
) -> None:
    """Run the loop.

    Args:
        weights, mean, square: fp32 [n], changed in place.
        grad: [n] in any floating dtype.
        param: [n], takes the new weights.
        numbers: see `numbers_of`.
    """
    scale, l2, rest1, beta2, rest2, decay, rate, correction, eps = numbers.unbind()
    wide = grad.float() * scale + l2 * weights
    new_mean = mean + rest1 * (wide - mean)
    new_square = square * beta2 + rest2 * wide * wide
    new = weights * decay - rate * new_mean / (new_square.sqrt() * correction + eps)
    mean.copy_(new_mean)
    square.copy_(new_square)
    weights.copy_(new)
    param.copy_(new)


def numbers_of(group: dict[str, Any], scale: float, step: float, *, decoupled: bool) -> Tensor:
    """Return what a step of a param group computes with: fp32 [9].

    Args:
        step: number of the step, from 1 on; infinity: nothing is corrected.
        decoupled: weight decay is AdamW's.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), group["weight_decay"]
    return torch.tensor(
        [
            -scale if group["maximize"] else scale,
            0.0 if decoupled else decay,
            1 - beta1,
            beta2,
            1 - beta2,
            1 - lr * decay if decoupled else 1.0,
            lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            group["eps"],
        ]
    )


@lru_cache(maxsize=1)
def loop() -> Callable[..., None] | None:
    """Return `update`, compiled; None where that does not work here, which is logged once."""
    compiled: Callable[..., None] = torch.compile(update, dynamic=True, fullgraph=True)
    trial = [torch.zeros(1024) for _ in range(3)]
    low = torch.zeros(1024, dtype=torch.bfloat16)
    try:
        compiled(trial[0], low, trial[1], trial[2], low.clone(), torch.ones(9))
    except Exception as error:  # no compiler, or one that does not fit: whatever it is, there is another way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning("the optimizer's step is not compiled, and runs in torch's kernels: %s", reason)
        return None
    logger.info("the optimizer's step on the CPU is compiled")
    return compiled


def step(
    loop: Callable[..., None], rule: FusedRule, group: dict[str, Any], item: FusedSlice, scale: float
) -> bool:
    """Step a slice by the compiled loop, if it is one for that; return whether it was."""
    mean, square = item.state["exp_avg"], item.state["exp_avg_sq"]
    wide = item.weights.dtype == mean.dtype == square.dtype == torch.float32
    if item.param is None or not wide or item.weights.numel() < SMALLEST:
        return False
    decoupled = bool(rule.decoupled)
    numbers = numbers_of(group, scale, float(item.state["step"]), decoupled=decoupled)
    loop(item.weights, item.grad, mean, square, item.param, numbers)
    return True
