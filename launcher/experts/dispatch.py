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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from launcher.comm import Axis, all_to_all
from launcher.errors import LauncherError
from launcher.experts.counts import counts_of
from launcher.models.activation import recomputing

MOST = 10_000  # layers
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
    def of(cls, axis: Axis, experts: list[int], index: Tensor, layer: tuple[int, str] = (0, "")) -> Routing:
        """Find out who gets how many pairs. A collective.

        Args:
            experts: how many each rank has.
            index: [T, k], the experts of each token. A number outside of 0 .. all experts - 1 names no expert: nothing
                is sent, and its result is 0.
            layer: its number and its name; all ranks must call the same one.
        """
        flat, all_experts = index.reshape(-1), sum(experts)
        if axis.group is None and axis.degree > 1:
            flat = _rehearsed(flat, experts, axis.rank)
        named = flat.where((flat >= 0) & (flat < all_experts), all_experts)
        counts = counts_of(named, all_experts + 1)[:all_experts]
        # which call it is comes first: ranks in different layers have different numbers of counts
        call = counts.new_full((1,), layer[0] * len(_KINDS) + _kind_of_call())
        of_ranks = [torch.cat([call, part]) for part in counts.split(experts)]
        told = of_ranks[axis.rank].repeat(axis.degree, 1)  # [from each rank, own experts and the kind]
        all_to_all(of_ranks, list(told), axis, COUNTS).wait()
        kinds, told = told[:, 0], told[:, 1:]
        # the one time that the host waits for the device
        sums = torch.stack([torch.stack([part[1:].sum() for part in of_ranks]), told.sum(1), kinds])
        outgoing, incoming, ways = sums.tolist()
        if len(set(ways)) > 1:
            raise _other_calls(axis, ways, layer[1])
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

    @cached_property
    def tokens(self) -> Tensor:
        """[pairs sent], the token of each."""
        return self.order.div(self.shape[1], rounding_mode="floor")

    @cached_property
    def places(self) -> Tensor:
        """[pairs sent], where in `order` each pair is, in token order."""
        return self.order.argsort()

    @cached_property
    def starts(self) -> Tensor:
        """[T], where the pairs of each token begin in `places`."""
        pairs = counts_of(self.tokens, self.shape[0])
        return pairs.cumsum(0) - pairs

    def sum_of_tokens(self, pairs: Tensor, weights: Tensor | None = None) -> Tensor:
        """[pairs sent, H] -> the sum [T, H] of each token's pairs, in its order and in fp32 at least; 0 where it has
        none.

        Args:
            weights: [T, k].
        """
        if not len(self.order):
            return pairs.new_zeros(self.shape[0], pairs.shape[1])
        if weights is not None:
            weights = weights.flatten()[self.order[self.places]]
        # a lookup of rows that are weighted and added on the way: nothing of [pairs, H] is written
        return F.embedding_bag(self.places, pairs, self.starts, mode="sum", per_sample_weights=weights)


_load = 1.0


@contextmanager
def rehearsed_load(load: float) -> Iterator[None]:
    """Inside, a rank that rehearses gets so many times an even share of the tokens for its experts."""
    global _load
    before, _load = _load, load
    try:
        yield
    finally:
        _load = before


def _rehearsed(flat: Tensor, experts: list[int], rank: int) -> Tensor:
    """Return an expert for each pair: there are no values that a router could have seen. Other ranks send this one as
    much as it sends itself."""
    places, count, first = torch.arange(flat.numel(), device=flat.device), experts[rank], sum(experts[:rank])
    own = min(flat.numel(), round(flat.numel() * _load * count / sum(experts)))
    others = first + count + places % max(1, sum(experts) - count)
    return (first + places % count).where(places < own, others % sum(experts))


_KINDS = ("without gradients", "with gradients", "recomputed in a backward")


def _kind_of_call() -> int:
    """Return the place in `_KINDS` of a call of the experts now."""
    return 2 if recomputing() else int(torch.is_grad_enabled())


def _other_calls(axis: Axis, calls: list[int], layer: str) -> LauncherError:
    """Return the error of ranks that meet in different calls. What one is in the middle of may be no call at all."""
    mine = calls[axis.rank] // len(_KINDS)
    said = []
    for rank, call in enumerate(calls):
        number, kind = divmod(call, len(_KINDS))
        where = (
            ""
            if number == mine
            else f" layer {number} of those with experts,"
            if 0 <= number < MOST
            else " elsewhere,"
        )
        said.append(f"{axis.name} rank {rank}{where} {_KINDS[kind]}")
    return LauncherError(
        f"{axis.members} share experts and call them at the same time in different ways: {', '.join(said)}",
        where=f"{layer or 'experts'} on {axis.name} rank {axis.rank}",
        fix="call the same layers equally often on all of these ranks, also in evaluation",
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
    mine: Tensor = _Combine.apply(results, weights, received, anchor, routing)
    return mine


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return routing.send(hidden.index_select(0, routing.tokens), DISPATCH)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pairs = ctx.routing.send(gradient.contiguous(), DISPATCH, back=True)
        return ctx.routing.sum_of_tokens(pairs), None


class _Combine(torch.autograd.Function):
    """See [Note: Every rank joins every exchange]: `received` and `anchor` get no gradient, and keep this node in the
    graph."""

    @staticmethod
    def forward(
        ctx: Any, results: Tensor, weights: Tensor, received: Tensor, anchor: Tensor | None, routing: Routing
    ) -> Tensor:
        pairs = routing.send(results.contiguous(), COMBINE, back=True)  # [pairs sent, H]
        ctx.routing = routing
        ctx.save_for_backward(pairs, weights)
        # in fp32 where router or experts are, as transformers does it
        wide = torch.promote_types(pairs.dtype, weights.dtype)
        return routing.sum_of_tokens(pairs.to(wide), weights.to(wide)).to(received.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        (pairs, weights), routing = ctx.saved_tensors, ctx.routing
        wide = torch.promote_types(pairs.dtype, weights.dtype)
        of_pairs = gradient.to(wide).index_select(0, routing.tokens)  # [pairs sent, H]
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = weights.new_zeros(weights.shape)
            of_weights.view(-1)[routing.order] = (of_pairs * pairs).sum(1).to(weights.dtype)
        of_pairs.mul_(weights.flatten()[routing.order, None])
        return routing.send(of_pairs.to(pairs.dtype), COMBINE), of_weights, None, None, None
