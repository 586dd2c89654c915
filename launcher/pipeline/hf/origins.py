"""Origins of the tensors of a forward: whether they hold what the model computes, or lead back to a stand-in.

Found once for each kind of batch, with autograd: what parts and blocks give is marked, and a walk along the graph of
any later tensor ends at the marks that it was made from. What has no gradient is known by identity alone.
"""

from __future__ import annotations

from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Origin(Flag):
    """The origin of a tensor. Nothing: from the batch and from weights, as on every stage."""

    NOTHING = 0
    HERE = auto()  # received, or computed by a part or a block that runs here
    STAND_IN = auto()


class Origins:
    """The marks of one forward."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Origin]] = {}  # the tensor keeps its id

    def mark(self, values: Any, origin: Origin) -> Any:
        """Return the values that are equal to these, and known to be of `origin`."""

        def marked(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point() and torch.is_grad_enabled():
                return _Mark.apply(value if value.requires_grad else value.detach().requires_grad_(), origin)
            self._known[id(value)] = value, origin
            return value

        return tree_map(marked, values)

    def of(self, tensor: Tensor) -> Origin:
        """Return what a tensor was made from."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        found, seen, ahead = Origin.NOTHING, set(), [tensor.grad_fn]
        while ahead:
            node: Any = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(origin := getattr(node, "origin", None), Origin):
                found |= origin
            else:
                ahead += [before for before, _ in node.next_functions]
        return found


class _Mark(torch.autograd.Function):
    """The same values. A copy: a view could not be changed in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, origin: Origin) -> Tensor:
        ctx.origin = origin
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
