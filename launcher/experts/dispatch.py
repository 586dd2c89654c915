"""Tokens to the ranks that have their experts, and what the experts make of them back.

Pairs are (token, expert): a token that k experts take is k pairs. A rank sorts its pairs by expert, so that those for
one rank lie together, and the ranks tell each other how many there are. Then one all-to-all takes the hidden states to
the experts, and one brings the results back. They are weighted where the tokens are, and added up in the order in which
the router named the experts: the result does not depend on who computed it.

[Note: Every rank joins every exchange]
All-to-alls are collectives in backward, too. A rank whose experts got no token still has to take part, though its
experts leave nothing in the graph. So `combine` depends on what `dispatch` received, whatever the experts did with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from launcher.comm import Axis, all_to_all
from launcher.errors import LauncherError
from launcher.models.activation import recomputing

COUNTS, DISPATCH, COMBINE = "experts/counts", "experts/dispatch", "experts/combine"


@dataclass(frozen=True)
class Routing:
    """The way of one call's pairs, as this rank sees it.

    Args:
        axis: ep.
        shape: (tokens T, experts of a token k).
        order: [pairs sent], the place of each in token order (token x k + which), sorted by expert.
        outgoing, incoming: pairs for each rank, and from each.
        local_experts: [pairs received], the expert of each, counted from this rank's first.
    """

    axis: Axis
    shape: tuple[int, int]
    order: Tensor
    outgoing: list[int]
    incoming: list[int]
    local_experts: Tensor

    @classmethod
    def of(cls, axis: Axis, experts: list[int], index: Tensor) -> Routing:
        """Find out who gets how many pairs. A collective.

        Args:
            experts: how many each rank has.
            index: [T, k], the experts of each token. A number outside of 0 .. all experts - 1 names no expert: nothing
                is sent, and its result is 0.
        """
        flat, all_experts = index.reshape(-1), sum(experts)
        if axis.group is None:  # a rehearsal: every expert gets as many as the others
            flat = torch.arange(flat.numel(), device=index.device) % all_experts
        named = flat.where((flat >= 0) & (flat < all_experts), all_experts)
        counts = torch.bincount(named, minlength=all_experts + 1)[:all_experts]
        # with what kind of call it is, behind the counts
        of_ranks = [torch.cat([part, part.new_tensor([_kind_of_call()])]) for part in counts.split(experts)]
        told = of_ranks[axis.rank].repeat(axis.degree, 1)  # [from each rank, own experts and the kind]
        all_to_all(of_ranks, list(told), axis, COUNTS).wait()
        kinds, told = told[:, -1], told[:, :-1]
        # the one time that the host waits for the device
        outgoing = torch.stack([part[:-1].sum() for part in of_ranks]).tolist()
        incoming, ways = told.sum(1).tolist(), kinds.tolist()
        if len(set(ways)) > 1:
            raise _other_calls(axis, ways)
        order = named.argsort(stable=True)[: sum(outgoing)]
        mine = torch.arange(experts[axis.rank], device=index.device).repeat(axis.degree)
        local = mine.repeat_interleave(told.reshape(-1), output_size=sum(incoming))
        return cls(axis, (index.shape[0], index.shape[1]), order, outgoing, incoming, local)

    def send(self, pairs: Tensor, tag: str, *, back: bool = False) -> Tensor:
        """Exchange rows: [pairs sent, H] -> [pairs received, H], or `back` the other way."""
        outgoing, incoming = (self.incoming, self.outgoing) if back else (self.outgoing, self.incoming)
        received = pairs.new_empty(sum(incoming), *pairs.shape[1:])
        to, come, rank = pairs.split(outgoing), received.split(incoming), self.axis.rank
        sent = all_to_all([part.view(-1) for part in to], [part.view(-1) for part in come], self.axis, tag)
        come[rank].copy_(to[rank])  # while the others are on their way
        sent.wait()
        return received

    def sorted(self, pairs: Tensor) -> Tensor:
        """[T x k, ...] in token order -> [pairs sent, ...]."""
        return pairs.index_select(0, self.order)

    def in_token_order(self, pairs: Tensor) -> Tensor:
        """[pairs sent, H] -> [T, k, H]; 0 where no expert is named."""
        tokens, k = self.shape
        complete = len(self.order) == tokens * k
        flat = (pairs.new_empty if complete else pairs.new_zeros)(tokens * k, pairs.shape[1])
        flat[self.order] = pairs
        return flat.view(tokens, k, pairs.shape[1])


_KINDS = ("without gradients", "with gradients", "recomputed in a backward")


def _kind_of_call() -> int:
    """Return the place in `_KINDS` of a call of the experts now."""
    return 2 if recomputing() else int(torch.is_grad_enabled())


def _other_calls(axis: Axis, kinds: list[int]) -> LauncherError:
    said = ", ".join(f"{axis.name} rank {rank} {_KINDS[kind]}" for rank, kind in enumerate(kinds))
    return LauncherError(
        f"{axis.members} share experts and call them at the same time in different ways: {said}",
        where="experts",
        fix="call the model equally often on all of these ranks, also in evaluation",
    )


def dispatch(hidden: Tensor, routing: Routing) -> Tensor:
    """Return the hidden states [pairs received, H] for this rank's experts, from [T, H] of each rank."""
    received: Tensor = _Dispatch.apply(hidden, routing)
    return received


def combine(results: Tensor, weights: Tensor, received: Tensor, routing: Routing, *, trains: bool) -> Tensor:
    """Return the weighted sum [T, H] of what the experts made of this rank's tokens, wherever they are.

    Args:
        results: [pairs received, H] of this rank's experts.
        weights: [T, k] of the router.
        received: what `dispatch` gave.
        trains: some rank asks for gradients of the experts.
    """
    anchor = received.new_empty(0, requires_grad=True) if trains and torch.is_grad_enabled() else None
    pairs: Tensor = _Combine.apply(results, received, anchor, routing)
    # in fp32 where router or experts are, as transformers does it
    return (pairs * weights[..., None]).sum(1).to(received.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        tokens = routing.order.div(routing.shape[1], rounding_mode="floor")
        return routing.send(hidden.index_select(0, tokens), DISPATCH)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pairs = ctx.routing.send(gradient.contiguous(), DISPATCH, back=True)
        return ctx.routing.in_token_order(pairs).sum(1), None


class _Combine(torch.autograd.Function):
    """See [Note: Every rank joins every exchange]: `received` and `anchor` get no gradient, and keep this node in the
    graph."""

    @staticmethod
    def forward(
        ctx: Any, results: Tensor, received: Tensor, anchor: Tensor | None, routing: Routing
    ) -> Tensor:
        ctx.routing = routing
        return routing.in_token_order(routing.send(results.contiguous(), COMBINE, back=True))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        pairs = ctx.routing.sorted(gradient.flatten(0, 1))
        return ctx.routing.send(pairs, COMBINE), None, None, None
