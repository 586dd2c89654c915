"""Our elementwise optimizers: Lion, and torch's Adam without bias correction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW


class Lion(torch.optim.Optimizer):
    """p <- (1 - lr wd) p - lr sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g.

    Args:
        params: parameters or param groups.
        lr, betas, weight_decay: DeepSpeed's defaults; the paper's betas are (0.9, 0.99).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads: list[Tensor] = [p.grad for p in params if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
        self.update(group, params, grads, [self.state[p]["exp_avg"] for p in params])

    @staticmethod
    def update(
        group: dict[str, Any], params: list[Tensor], grads: list[Tensor], moments: list[Tensor]
    ) -> None:
        """Step the tensors of one param group."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        update = torch._foreach_lerp(moments, grads, 1 - beta1)
        torch._foreach_sign_(update)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, update, alpha=-lr)
        torch._foreach_lerp_(moments, grads, 1 - beta2)


class _Uncorrected:
    """Sets the step to infinity: 1 - beta ** step is then exactly 1, which disables bias correction in
    torch's kernels, fused ones included."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        for step in lists[-1]:
            step.fill_(math.inf)
        return has_complex


class UncorrectedAdam(_Uncorrected, Adam):  # type: ignore[misc]
    """torch.optim.Adam without bias correction."""


class UncorrectedAdamW(_Uncorrected, AdamW):  # type: ignore[misc]
    """torch.optim.AdamW without bias correction."""
