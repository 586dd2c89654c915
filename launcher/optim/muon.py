"""Muon (Jordan 2024): the momentum of a matrix, orthogonalised; other parameters are stepped by Adam.

Momentum is elementwise, so it stays in slices like every other state. Orthogonalising needs the matrix: each one is
assembled on one rank (`exchange.py`), made orthogonal there, and its slices go back.
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
NOT_BY_MUON = (
    "embed",
    "lm_head",
    "bias",
)  # in a name; biases of experts have a row for each and are no matrices


class Muon(WholeOptimizer):
    """m <- b m + (1 - b) g;  u = b m + (1 - b) g;  p <- (1 - lr wd) p - lr orthogonal(u).

    Args:
        groups: param groups of slices. Those with "use_muon" have lr, weight_decay, momentum and ns_method (or the
            options of torch.optim.Muon); the others are Adam's.
        adam: makes the optimizer of the other groups.
    """

    def __init__(self, groups: Groups, adam: Callable[[Groups], torch.optim.Optimizer] | None = None) -> None:
        super().__init__(groups, {})
        self._updates: dict[Tensor, Tensor] = {}
        self.adam: torch.optim.Optimizer | None = None
        rest = [group for group in self.param_groups if not group["use_muon"]]
        if adam is not None and rest:
            # One set of groups and one state for both: learning rates and checkpoints reach Adam's share, too.
            self.adam = adam([dict(group) for group in rest])
            for group, filled in zip(rest, self.adam.param_groups, strict=True):
                group.update(filled)
            self.adam.param_groups, self.adam.state = rest, self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the gradients of matrices into the momentum, and step everything else."""
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
        # In the gradient's own memory, which is not needed any more.
        return grad.lerp_(momentum, group["momentum"]) if group.get("nesterov", True) else momentum

    @torch.no_grad()
    def finish(self, stepped: list[Stepped]) -> None:
        # Experts that are spread lie on an axis of their own. A part may be on the host: the same part on all ranks.
        alike: dict[tuple[Axis, torch.device], list[Stepped]] = {}
        for each in stepped:
            if each.group["use_muon"]:
                flat = each.slot.flat
                alike.setdefault((flat.axis, flat.optim_placement.device), []).append(each)
        for matrices in alike.values():
            self._step_matrices(matrices)
        self._updates.clear()

    def _step_matrices(self, matrices: list[Stepped]) -> None:
        """Step matrices of one axis. A collective of it."""
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
    """Return what torch.optim.Muon makes of an update: one step of it from zero, without momentum, at a rate of 1."""
    taken = nn.Parameter(torch.zeros_like(update))
    taken.grad = update
    keys = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    options = {key: group[key] for key in keys}
    torch.optim.Muon([taken], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **options).step()
    return taken.detach().neg_()


def by_muon(name: str, parameter: Tensor) -> bool:
    """Return whether Muon steps the parameter: `use_muon` set on it, else a matrix but no embedding, head or bias."""
    said = getattr(parameter, "use_muon", None)
    if said is not None:
        return bool(said)
    return parameter.dim() >= 2 and not any(word in name.lower() for word in NOT_BY_MUON)


def halves(groups: Groups, parameters: dict[str, nn.Parameter], params: dict[str, Any]) -> Groups:
    """Return every param group as Muon's half and Adam's, as DeepSpeed splits them.

    Args:
        groups: dicts with "names" and options, which beat `params`.
        parameters: by name.
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
