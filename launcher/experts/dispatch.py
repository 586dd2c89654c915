"""Sends tokens to the ranks of their experts, and the experts' outputs back.

A pair is (token, expert): a token with k experts makes k pairs. A rank sorts its pairs by expert, so that the
pairs for one rank are contiguous, and the ranks exchange their counts. Then one all-to-all sends the hidden
states to the experts, and another returns the results. The results are weighted on the rank of the token, and
summed in the order of the router's choices, so the sum does not depend on where the experts are.

[Note: Every rank joins every exchange]
All-to-alls are collectives in backward, too. A rank whose experts got no tokens still has to take part,
although its experts leave nothing in the graph. So `combine` depends on the output of `dispatch`, whether or
not the experts used it.
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

MOST = 10_000  # upper bound of layer numbers
COUNTS, DISPATCH, COMBINE = "experts/counts", "experts/dispatch", "experts/combine"


@dataclass(frozen=True)
class Routing:
    """Where the pairs of one call go, from the view of this rank.

    Args:
        axis: ep.
        shape: (tokens T, experts per token k).
        order: [pairs sent], index of each pair in token order (token x k + choice), sorted by expert.
        outgoing, incoming: number of pairs sent to each rank, and received from each rank.
        local_experts: [pairs received], the expert of each, relative to this rank's first.
    """

    axis: Axis
    shape: tuple[int, int]
    order: Tensor
    outgoing: list[int]
    incoming: list[int]
    local_experts: Tensor

    @classmethod
    def of(cls, axis: Axis, experts: list[int], index: Tensor, layer: tuple[int, str] = (0, "")) -> Routing:
        """Exchange the numbers of pairs that ranks send each other. A collective.

        Args:
            experts: number of experts on each rank.
            index: [T, k], the experts of each token. Numbers outside of 0 .. all experts - 1 denote no
                expert: nothing is sent, and the result is 0.
            layer: number and name of the layer; all ranks must call the same one.
        """
        flat, all_experts = index.reshape(-1), sum(experts)
        if axis.group is None and axis.degree > 1:
            flat = _rehearsed(flat, experts, axis.rank)
        named = flat.where((flat >= 0) & (flat < all_experts), all_experts)
        counts = counts_of(named, all_experts + 1)[:all_experts]
        # the id of the call comes first, because ranks in different layers have different numbers of counts
        call = counts.new_full((1,), layer[0] * len(_KINDS) + _kind_of_call())
        of_ranks = [torch.cat([call, part]) for part in counts.split(experts)]
        told = of_ranks[axis.rank].repeat(axis.degree, 1)  # [source rank, call id and local experts]
        all_to_all(of_ranks, list(told), axis, COUNTS).wait()
        kinds, told = told[:, 0], told[:, 1:]
        # the only point where the host waits for the device
        sums = torch.stack([torch.stack([part[1:].sum() for part in of_ranks]), told.sum(1), kinds])
        outgoing, incoming, ways = sums.tolist()
        if len(set(ways)) > 1:
            raise _other_calls(axis, ways, layer[1])
        order = named.argsort(stable=True)[: sum(outgoing)]
        mine = torch.arange(experts[axis.rank], device=index.device).repeat(axis.degree)
        local = mine.repeat_interleave(told.reshape(-1), output_size=sum(incoming))
        return cls(axis, (index.shape[0], index.shape[1]), order, outgoing, incoming, local)

    def send(self, pairs: Tensor, tag: str, *, back: bool = False) -> Tensor:
        """Exchange rows: [pairs sent, H] -> [pairs received, H]; with `back`, in the reverse direction."""
        outgoing, incoming = (self.incoming, self.outgoing) if back else (self.outgoing, self.incoming)
        received = pairs.new_empty(sum(incoming), *pairs.shape[1:])
        to, come, rank = pairs.split(outgoing), received.split(incoming), self.axis.rank
        sent = all_to_all([part.view(-1) for part in to], [part.view(-1) for part in come], self.axis, tag)
        come[rank].copy_(to[rank])  # overlaps with the exchange
        sent.wait()
        return received

    @cached_property
    def tokens(self) -> Tensor:
        """Return [pairs sent]: the token of each pair."""
        return self.order.div(self.shape[1], rounding_mode="floor")

    @cached_property
    def places(self) -> Tensor:
        """Return [pairs sent]: the index in `order` of each pair, in token order."""
        return self.order.argsort()

    @cached_property
    def starts(self) -> Tensor:
        """Return [T]: where the pairs of each token begin in `places`."""
        pairs = counts_of(self.tokens, self.shape[0])
        return pairs.cumsum(0) - pairs

    def sum_of_tokens(self, pairs: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum [T, H] of each token's pairs [pairs sent, H], in the router's order and accumulated
        in at least fp32; 0 for a token without pairs.

        Args:
            weights: [T, k].
        """
        if not len(self.order):
            return pairs.new_zeros(self.shape[0], pairs.shape[1])
        if weights is not None:
            weights = weights.flatten()[self.order[self.places]]
        # fuses lookup, weighting and sum: no [pairs, H] intermediate is written
        return F.embedding_bag(self.places, pairs, self.starts, mode="sum", per_sample_weights=weights)


_load = 1.0


@contextmanager
def rehearsed_load(load: float) -> Iterator[None]:
    """In this context, the experts of a rehearsed rank get `load` times an even share of the tokens."""
    global _load
    before, _load = _load, load
    try:
        yield
    finally:
        _load = before


def _rehearsed(flat: Tensor, experts: list[int], rank: int) -> Tensor:
    """Return a made-up expert for each pair, as a rehearsal has no values to route by. Other ranks send this
    rank as many pairs as it sends itself."""
    places, count, first = torch.arange(flat.numel(), device=flat.device), experts[rank], sum(experts[:rank])
    own = min(flat.numel(), round(flat.numel() * _load * count / sum(experts)))
    others = first + count + places % max(1, sum(experts) - count)
    return (first + places % count).where(places < own, others % sum(experts))


_KINDS = ("without gradients", "with gradients", "recomputing in backward")


def _kind_of_call() -> int:
    """Return the index in `_KINDS` of the current call of the experts."""
    return 2 if recomputing() else int(torch.is_grad_enabled())


def _other_calls(axis: Axis, calls: list[int], layer: str) -> LauncherError:
    """Return the error for ranks that meet in different calls, or in an unrelated collective."""
    mine = calls[axis.rank] // len(_KINDS)
    said = []
    for rank, call in enumerate(calls):
        number, kind = divmod(call, len(_KINDS))
        where = (
            ""
            if number == mine
            else f" in expert layer {number},"
            if 0 <= number < MOST
            else " in another collective,"
        )
        said.append(f"{axis.name} rank {rank}{where} {_KINDS[kind]}")
    return LauncherError(
        f"{axis.members} called their experts inconsistently: {', '.join(said)}",
        where=f"{layer or 'experts'} on {axis.name} rank {axis.rank}",
        fix="call the same layers the same number of times on all of these ranks, also in evaluation",
    )


def dispatch(hidden: Tensor, routing: Routing) -> Tensor:
    """Return the hidden states [pairs received, H] for this rank's experts, from [T, H] of each rank."""
    received: Tensor = _Dispatch.apply(hidden, routing)
    return received


def combine(results: Tensor, weights: Tensor, received: Tensor, routing: Routing, *, trains: bool) -> Tensor:
    """Return the weighted sum [T, H] of the outputs, from all ranks, for this rank's tokens.

    Args:
        results: [pairs received, H], outputs of this rank's experts.
        weights: [T, k], from the router.
        received: the output of `dispatch`.
        trains: some rank needs gradients through the experts.
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
    """See [Note: Every rank joins every exchange]: `received` and `anchor` get no gradient, but keep this
    node in the graph."""

    @staticmethod
    def forward(
        ctx: Any, results: Tensor, weights: Tensor, received: Tensor, anchor: Tensor | None, routing: Routing
    ) -> Tensor:
        pairs = routing.send(results.contiguous(), COMBINE, back=True)  # [pairs sent, H]
        ctx.routing = routing
        ctx.save_for_backward(pairs, weights)
        # in fp32 if the router or the experts are, as in transformers
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
