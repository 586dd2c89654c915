"""Lamb (You et al. 2019, arXiv 1904.00962), with DeepSpeed's formula: Adam's update scaled by |weights| / |update|.

Both norms are of whole parameters. Ranks hold slices, so one fp64 all-reduce sums the squares of all
parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from launcher.comm import all_reduce
from launcher.optim.whole import Stepped, WholeOptimizer


class Lamb(WholeOptimizer):
    """u = m / (sqrt(v) + eps) + wd p;  p <- p - lr c clip(|p| / |u|, min_coeff, max_coeff) u.

    c is Adam's bias correction, sqrt(1 - b2^t) / (1 - b1^t). The ratio is 1 if one of the norms is 0.

    Args:
        params: param groups of slices.
        lr, betas, eps, weight_decay, bias_correction: as in Adam.
        max_coeff, min_coeff: bounds of the trust ratio.
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        eps_inside_sqrt: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, {**options, "eps_inside_sqrt": eps_inside_sqrt})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the moments with the gradients."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    @torch.no_grad()
    def finish(self, stepped: list[Stepped]) -> None:
        if not stepped:
            return
        flat = stepped[0].slot.flat
        squares = torch.zeros(2, len(stepped), dtype=torch.float64, device=flat.master.device)
        for i, each in enumerate(stepped):
            if each.slice is not None:
                squares[0, i] = _square(each.slice)
                squares[1, i] = _square(self._update(each.slice, each.group))
        if flat.shards_optim:
            all_reduce(squares, flat.axis, "optimizer/lamb").wait()
        known = (squares > 0).all(0).double()
        # the only synchronization with the host
        ratios, both = torch.stack([(squares[0] / squares[1]).sqrt(), known]).tolist()
        for each, ratio, known in zip(stepped, ratios, both, strict=True):
            if each.slice is not None:
                group = each.group
                trust = min(max(ratio, group["min_coeff"]), group["max_coeff"]) if known else 1.0
                size = self._rate(each.slice, group) * trust
                each.slice.add_(self._update(each.slice, group), alpha=-size)

    def _update(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the update [elements of the slice]. It is computed twice instead of stored, so that it
        exists for only one slice at a time."""
        state, eps = self.state[p], group["eps"]
        root = (
            (state["exp_avg_sq"] + eps).sqrt_()
            if group["eps_inside_sqrt"]
            else state["exp_avg_sq"].sqrt().add_(eps)
        )
        return torch.div(state["exp_avg"], root, out=root).add_(p, alpha=group["weight_decay"])

    def _rate(self, p: Tensor, group: dict[str, Any]) -> float:
        if not group["bias_correction"]:
            return float(group["lr"])
        step, (beta1, beta2) = self.state[p]["step"], group["betas"]
        return float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)


def _square(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()
