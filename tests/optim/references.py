"""Lion, Lamb and Muon as plain single-process optimizers over whole parameters: what ranks must agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Plain(Optimizer):
    """One formula, `update(p, gradient, state, group)`, for every parameter that has a gradient."""

    def __init__(self, params: Any, update: Callable[..., None], **options: Any) -> None:
        super().__init__(params, options)
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["t"] = state.get("t", 0) + 1
                    self.update(p, p.grad, state, group)


def lion(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    b1, b2 = group["betas"]
    direction = torch.sign(b1 * m + (1 - b1) * g)
    p.sub_(group["lr"] * (direction + group["weight_decay"] * p))
    m.copy_(b2 * m + (1 - b2) * g)


def lamb(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    m, v = (state.setdefault(key, torch.zeros_like(p)) for key in "mv")
    b1, b2 = group["betas"]
    m.copy_(b1 * m + (1 - b1) * g)
    v.copy_(b2 * v + (1 - b2) * g * g)
    inside = group.get("eps_inside_sqrt", False)
    u = m / ((v + group["eps"]).sqrt() if inside else v.sqrt() + group["eps"]) + group["weight_decay"] * p
    lr = group["lr"]
    if group.get("bias_correction", True):
        lr *= (1 - b2 ** state["t"]) ** 0.5 / (1 - b1 ** state["t"])
    ratio = (p.norm() / u.norm()).clamp(group["min_coeff"], group["max_coeff"])
    p.sub_(lr * (ratio if p.norm() > 0 and u.norm() > 0 else 1.0) * u)


def muon(p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    m = state.setdefault("m", torch.zeros_like(p))
    beta = group["momentum"]
    m.copy_(beta * m + (1 - beta) * g)
    u = beta * m + (1 - beta) * g
    rows, columns = p.shape
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.sub_(group["lr"] * newton_schulz(u) * max(1, rows / columns) ** 0.5)


def newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Two(Optimizer):
    """Muon for the matrices of a model, AdamW for the rest."""

    def __init__(self, model: nn.Module, *, matrices: dict[str, Any], rest: dict[str, Any]) -> None:
        params = list(model.parameters())
        super().__init__(params, {})
        two = [p for p in params if p.dim() == 2]
        self.parts: list[Optimizer] = [Plain(two, muon, **matrices)] if two else []
        self.parts.append(torch.optim.AdamW([p for p in params if p.dim() != 2], **rest))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
