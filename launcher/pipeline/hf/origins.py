"""Tracks the origins of tensors in a forward: computed by the model, or derived from a stand-in.

Origins are determined once for each kind of batch, with autograd: outputs of parts and blocks are marked, and
walking the graph of a later tensor leads to the marks it was computed from. Tensors without a gradient are
identified by object identity only.
"""

from __future__ import annotations

from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Origin(Flag):
    """The origin of a tensor. NOTHING: computed from the batch and from weights only, as on every stage."""

    NOTHING = 0
    HERE = auto()  # received, or computed by a part or block that runs on this stage
    STAND_IN = auto()


class Origins:
    """The marks of one forward."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Origin]] = {}  # by id, which is valid while the tensor is held

    def mark(self, values: Any, origin: Origin) -> Any:
        """Return these values, marked as being of `origin`."""

        def marked(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point() and torch.is_grad_enabled():
                return _Mark.apply(value if value.requires_grad else value.detach().requires_grad_(), origin)
            self._known[id(value)] = value, origin
            return value

        return tree_map(marked, values)

    def of(self, tensor: Tensor) -> Origin:
        """Return the origins that a tensor was computed from."""
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
    """Identity that leaves a mark in the graph. Copies: a view could not be modified in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, origin: Origin) -> Tensor:
        ctx.origin = origin
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
