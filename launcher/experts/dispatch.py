"""Sends tokens to the ranks of their experts, and the experts' outputs back: `routing` says where.

One all-to-all sends hidden states to the experts, and another returns the results. Backward sends gradients the
other way.

[Note: Every rank joins every exchange]
All-to-alls are collectives in backward, too. A rank whose experts got no tokens still has to take part,
although its experts leave nothing in the graph. So `combine` depends on the output of `dispatch`, whether or
not the experts used it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from launcher.experts.routing import Routing

DISPATCH, COMBINE, WEIGHTS = "experts/dispatch", "experts/combine", "experts/weights"


def dispatch(hidden: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the hidden states [pairs, H] for this rank's experts, from [T, H] of each rank, and the weights for
    `combine`: those [T, k] of this rank's tokens, or those [pairs] that came with the rows.

    Args:
        weights: [T, k], from the router.
    """
    if routing.by == "pairs":
        received: Tensor = _Dispatch.apply(hidden, None, routing)[0]
        return received, weights
    found: tuple[Tensor, Tensor] = _Dispatch.apply(hidden, weights, routing)
    return found


def combine(results: Tensor, weights: Tensor, received: Tensor, routing: Routing, *, trains: bool) -> Tensor:
    """Return the weighted sum [T, H] of the outputs, from all ranks, for this rank's tokens.

    Args:
        results: [pairs, H], outputs of this rank's experts.
        weights, received: what `dispatch` returned.
        trains: some rank needs gradients through the experts.
    """
    anchor = received.new_empty(0, requires_grad=True) if trains and torch.is_grad_enabled() else None
    function = _Combine if routing.by == "pairs" else _CombineSums
    mine: Tensor = function.apply(results, weights, received, anchor, routing)
    return mine


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor | None]:
        ctx.routing = routing
        received = routing.pairs.take(routing.send(routing.sent.take(hidden), DISPATCH))
        if weights is None:
            return received, None
        of_rows = routing.send(routing.sent.take(weights), WEIGHTS)  # [rows received, k]
        of_pairs = of_rows.view(-1)[routing.pairs.key]
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(of_pairs)
        return received, of_pairs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor, of_weights: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        routing: Routing = ctx.routing
        rows = routing.send(routing.pairs.sum(gradient.contiguous()), DISPATCH, back=True)
        if ctx.needs_input_grad[1]:
            assert of_weights is not None
            received = of_weights.new_zeros(routing.pairs.size, routing.shape[1])
            received.view(-1)[routing.pairs.key] = of_weights
            of_weights = routing.sent.sum(routing.send(received, WEIGHTS, back=True))
        return routing.sent.sum(rows), of_weights if ctx.needs_input_grad[1] else None, None


class _Combine(torch.autograd.Function):
    """Weights rows on the rank of their token. See [Note: Every rank joins every exchange]: `received` and `anchor`
    get no gradient, but keep this node in the graph."""

    @staticmethod
    def forward(
        ctx: Any, results: Tensor, weights: Tensor, received: Tensor, anchor: Tensor | None, routing: Routing
    ) -> Tensor:
        rows = routing.send(routing.pairs.sum(results.contiguous()), COMBINE, back=True)  # [rows sent, H]
        ctx.routing = routing
        ctx.save_for_backward(rows, weights)
        # in fp32 if the router or the experts are, as in transformers
        wide = torch.promote_types(rows.dtype, weights.dtype)
        of_rows = weights.to(wide).flatten()[routing.sent.key]
        return routing.sent.sum(rows.to(wide), of_rows).to(received.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        rows, weights = ctx.saved_tensors
        routing: Routing = ctx.routing
        wide = torch.promote_types(rows.dtype, weights.dtype)
        of_rows = routing.sent.take(gradient.to(wide))  # [rows sent, H]
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = weights.new_zeros(weights.shape)
            of_weights.view(-1)[routing.sent.key] = (of_rows * rows).sum(1).to(weights.dtype)
        of_rows.mul_(weights.flatten()[routing.sent.key, None])
        received = routing.send(of_rows.to(rows.dtype), COMBINE)
        return routing.pairs.take(received), of_weights, None, None, None


class _CombineSums(torch.autograd.Function):
    """Weights pairs on the rank of their expert, and returns one sum for each row. `received` and `anchor` as
    above."""

    @staticmethod
    def forward(
        ctx: Any, results: Tensor, weights: Tensor, received: Tensor, anchor: Tensor | None, routing: Routing
    ) -> Tensor:
        ctx.routing = routing
        ctx.save_for_backward(results, weights)
        wide = torch.promote_types(results.dtype, weights.dtype)
        rows = routing.pairs.sum(results.to(wide), weights.to(wide)).to(received.dtype)  # [rows received, H]
        return routing.sent.sum(routing.send(rows, COMBINE, back=True))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        results, weights = ctx.saved_tensors
        routing: Routing = ctx.routing
        received = routing.send(routing.sent.take(gradient), COMBINE)
        of_pairs = routing.pairs.take(received).to(torch.promote_types(results.dtype, weights.dtype))
        of_weights = (of_pairs * results).sum(1).to(weights.dtype) if ctx.needs_input_grad[1] else None
        of_pairs.mul_(weights[:, None])
        return of_pairs.to(results.dtype), of_weights, None, None, None
