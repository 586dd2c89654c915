"""Muon (Jordan 2024): orthogonalised momentum for matrices; all other parameters are stepped by Adam.

Momentum is elementwise, so it stays in slices like all other state. Orthogonalisation needs whole matrices:
each one is assembled on one rank (`exchange.py`), orthogonalised there, and its slices are sent back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm import Axis
from launcher.optim.exchange import on_whole
from launcher.optim.orthogonalize import orthogonalize
from launcher.optim.whole import Stepped, WholeOptimizer

Groups = list[dict[str, Any]]
# substrings of names; biases of experts are 2-D (one row per expert) but not matrices
NOT_BY_MUON = ("embed", "lm_head", "bias")


class Muon(WholeOptimizer):
    """m <- b m + (1 - b) g;  u = b m + (1 - b) g;  p <- (1 - lr wd) p - lr orthogonal(u).

    Args:
        groups: param groups of slices. Groups with "use_muon" have lr, weight_decay, momentum and ns_method
            (or the options of torch.optim.Muon); the others have Adam's options.
        adam: creates the optimizer of the other groups.
    """

    def __init__(self, groups: Groups, adam: Callable[[Groups], torch.optim.Optimizer] | None = None) -> None:
        super().__init__(groups, {})
        self._updates: dict[Tensor, Tensor] = {}
        self.adam: torch.optim.Optimizer | None = None
        rest = [group for group in self.param_groups if not group["use_muon"]]
        if adam is not None and rest:
            # Both share their groups and state, so learning rates and checkpoints also apply to Adam's part.
            self.adam = adam([dict(group) for group in rest])
            for group, filled in zip(rest, self.adam.param_groups, strict=True):
                group.update(filled)
            self.adam.param_groups, self.adam.state = rest, self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the momentum of matrices, and step all other parameters."""
        for group in self.param_groups:
            if group["use_muon"]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._updates[p] = self._momentum(p, p.grad, group)
        if self.adam is not None:
            self.adam.step()

    def _momentum(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum: Tensor = self.state[p]["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        # Reuses the memory of the gradient, which is not needed any more.
        return grad.lerp_(momentum, group["momentum"]) if group.get("nesterov", True) else momentum

    @torch.no_grad()
    def finish(self, stepped: list[Stepped]) -> None:
        # Distributed experts have a separate axis. Some buffers may be on the host, the same on all ranks.
        alike: dict[tuple[Axis, torch.device], list[Stepped]] = {}
        for each in stepped:
            if each.group["use_muon"]:
                flat = each.slot.flat
                alike.setdefault((flat.axis, flat.optim_placement.device), []).append(each)
        for matrices in alike.values():
            self._step_matrices(matrices)
        self._updates.clear()

    def _step_matrices(self, matrices: list[Stepped]) -> None:
        """Step the matrices of one axis. A collective over that axis."""
        updates = [None if each.slice is None else self._updates[each.slice] for each in matrices]
        slots = [each.slot for each in matrices]
        results = on_whole(slots, updates, lambda i, u: _orthogonal(u, matrices[i].group), "optimizer/muon")
        for each, result in zip(matrices, results, strict=True):
            if each.slice is not None and result is not None:
                lr = float(each.group["lr"])
                each.slice.mul_(1 - lr * each.group["weight_decay"]).add_(result, alpha=-lr)


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    if "ns_coefficients" in group:
        return _by_torch(update, group)
    return orthogonalize(update, group["ns_method"])


def _by_torch(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the update of torch.optim.Muon: one step from zero, without momentum, with a learning rate of
    1."""
    taken = nn.Parameter(torch.zeros_like(update))
    taken.grad = update
    keys = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    options = {key: group[key] for key in keys}
    torch.optim.Muon([taken], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
    return taken.detach().neg_()


def by_muon(name: str, parameter: Tensor) -> bool:
    """Return whether Muon steps the parameter: its `use_muon` attribute or, by default, any matrix except
    embeddings, heads and biases."""
    said = getattr(parameter, "use_muon", None)
    if said is not None:
        return bool(said)
    return parameter.dim() >= 2 and not any(word in name.lower() for word in NOT_BY_MUON)


def halves(groups: Groups, parameters: dict[str, nn.Parameter], params: dict[str, Any]) -> Groups:
    """Split every param group into a Muon and an Adam group, as DeepSpeed does.

    Args:
        groups: dicts with "names" and options, which override `params`.
        parameters: parameters by name.
        params: `optimizer.params`.
    """
    muon_lr, adam_lr = (params.get(key, params["lr"]) for key in ("muon_lr", "adam_lr"))
    settings = {
        True: {"lr": muon_lr, **{key: params[key] for key in ("momentum", "ns_method", "weight_decay")}},
        False: {"lr": adam_lr, **{key: params[key] for key in ("betas", "eps", "weight_decay")}},
    }
    split = []
    for group in groups:
        for use_muon in (True, False):
            names = [name for name in group["names"] if by_muon(name, parameters[name]) is use_muon]
            if names:
                split.append({**settings[use_muon], **group, "names": names, "use_muon": use_muon})
    return split
