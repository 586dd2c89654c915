"""Where the tokens of one call of the experts go.

A pair is (token, expert): a token with k experts makes k pairs. What a rank sends are rows, sorted by the rank of
their experts, and there are two ways to make rows of pairs:

by        a row is           it is weighted on     sums
pairs     (token, expert)    the token's rank      in the router's order, wherever the experts are
tokens    (token, rank)      the experts' rank     of each rank's experts, then over ranks

A token with 8 experts on 2 ranks makes 8 rows of the first kind and 2 of the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.comm import Axis, all_to_all
from launcher.errors import LauncherError
from launcher.experts.counts import counts_of
from launcher.models.activation import recomputing

RowsBy = Literal["pairs", "tokens"]
MOST = 10_000  # upper bound of layer numbers
COUNTS, CHOICES = "experts/counts", "experts/choices"


@dataclass(frozen=True)
class Selection:
    """Rows that are selected from a tensor [size, H], and their sums back.

    Args:
        source: [rows], the row of the tensor that each of them is.
        size: rows of the tensor.
        key: [rows]: a sum adds in this order. Smaller for rows of a smaller `source`.
        permutes: each row of the tensor is selected once.
        in_order: it is selected at its place, too.
    """

    source: Tensor
    size: int
    key: Tensor
    permutes: bool = False
    in_order: bool = False

    @cached_property
    def places(self) -> Tensor:
        """Return [rows]: where to find the rows, in the order of `key`."""
        return self.key.argsort()

    @cached_property
    def starts(self) -> Tensor:
        """Return [size]: where the rows of each row of the tensor begin in `places`."""
        count = counts_of(self.source, self.size)
        return count.cumsum(0) - count

    def take(self, x: Tensor) -> Tensor:
        """Return the selected rows: [size, H] -> [rows, H]."""
        return x if self.in_order else x.index_select(0, self.source)

    def sum(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return for each row of the tensor the sum of its rows, accumulated in at least fp32; 0 if it was not
        selected: [rows, H] -> [size, H].

        Args:
            weights: [rows].
        """
        if not len(self.source):
            return rows.new_zeros(self.size, rows.shape[1])
        if self.permutes and weights is None:
            return rows if self.in_order else rows.index_select(0, self.places)
        if weights is not None:
            weights = weights[self.places]
        # fuses lookup, weighting and sum: no [rows, H] intermediate is written
        return F.embedding_bag(self.places, rows, self.starts, mode="sum", per_sample_weights=weights)


@dataclass(frozen=True)
class Routing:
    """Where the rows of one call go, from the view of this rank.

    Args:
        axis: ep.
        by: what a row is.
        shape: (tokens T, experts per token k).
        sent: the rows sent, selected from the tokens, sorted by rank.
        outgoing, incoming: number of rows sent to each rank, and received from each rank.
        pairs: the pairs of this rank's experts, selected from the rows received, sorted by expert.
        local_experts: [pairs], the expert of each, relative to this rank's first.
    """

    axis: Axis
    by: RowsBy
    shape: tuple[int, int]
    sent: Selection
    outgoing: list[int]
    incoming: list[int]
    pairs: Selection
    local_experts: Tensor

    @classmethod
    def of(
        cls,
        axis: Axis,
        experts: list[int],
        index: Tensor,
        layer: tuple[int, str] = (0, ""),
        by: RowsBy = "pairs",
    ) -> Routing:
        """Exchange the numbers of rows that ranks send each other. A collective.

        Args:
            experts: number of experts on each rank.
            index: [T, k], the experts of each token. Numbers outside of 0 .. all experts - 1 denote no
                expert: nothing is sent, and the result is 0.
            layer: number and name of the layer; all ranks must call the same one.
        """
        all_experts, mine = sum(experts), experts[axis.rank]
        if axis.group is None and axis.degree > 1:
            index = _rehearsed(index, experts, axis.rank)
        tokens, k = index.shape
        index = index.where((index >= 0) & (index < all_experts), all_experts)
        counts = counts_of(index.reshape(-1), all_experts + 1)[:all_experts].split(experts)
        if by == "tokens":
            needed = _needed(index, experts)  # [ranks, T]
            rows = needed.sum(1)
        else:
            rows = torch.stack([part.sum() for part in counts])
        # The id of the call comes first, because ranks in different layers have different numbers of counts.
        call = rows.new_full((1,), layer[0] * len(_KINDS) + _kind_of_call())
        of_ranks = [torch.cat([call, rows[rank, None], part]) for rank, part in enumerate(counts)]
        told = of_ranks[axis.rank].repeat(axis.degree, 1)  # [source rank, call id, rows and local experts]
        all_to_all(of_ranks, list(told), axis, COUNTS).wait()
        # The only point where the host waits for the device.
        numbers = torch.stack([rows, told[:, 1], told[:, 0], told[:, 2:].sum(1)])
        outgoing, incoming, ways, pairs = numbers.tolist()
        if len(set(ways)) > 1:
            raise _other_calls(axis, ways, layer[1])
        if by == "tokens":
            place = (~needed).view(-1).byte().argsort(stable=True)[: sum(outgoing)]
            token = place % tokens
            sent = Selection(token, tokens, token * axis.degree + place.div(tokens, rounding_mode="floor"))
            chosen = _exchange(axis, index[token], outgoing, incoming, CHOICES) - sum(experts[: axis.rank])
            if axis.group is None:  # in a rehearsal, other ranks send what this one sends to itself
                chosen = chosen.split(incoming)[axis.rank].repeat(axis.degree, 1)
            local = chosen.where((chosen >= 0) & (chosen < mine), mine).view(-1)
        else:
            order = index.reshape(-1).argsort(stable=True)[: sum(outgoing)]
            sent = Selection(order.div(k, rounding_mode="floor"), tokens, order)
            each = torch.arange(mine, device=index.device).repeat(axis.degree)
            local = each.repeat_interleave(told[:, 2:].reshape(-1), output_size=sum(incoming))
        permutes = by == "pairs"
        in_order = permutes and axis.degree == 1
        every = torch.arange(len(local), device=local.device) if in_order else local.argsort(stable=True)
        order = every[: sum(pairs)]
        source = order if permutes else order.div(k, rounding_mode="floor")
        received = Selection(source, sum(incoming), order, permutes, in_order)
        return cls(axis, by, (tokens, k), sent, outgoing, incoming, received, local[order])

    def send(self, rows: Tensor, tag: str, *, back: bool = False) -> Tensor:
        """Exchange rows: [rows sent, H] -> [rows received, H]; with `back`, in the reverse direction."""
        outgoing, incoming = (self.incoming, self.outgoing) if back else (self.outgoing, self.incoming)
        return _exchange(self.axis, rows, outgoing, incoming, tag)


def _exchange(axis: Axis, rows: Tensor, outgoing: list[int], incoming: list[int], tag: str) -> Tensor:
    """Send `outgoing` rows of [all of them, ...] to each rank; return those received, in the order of ranks."""
    received = rows.new_empty(sum(incoming), *rows.shape[1:])
    to, come, rank = rows.split(outgoing), received.split(incoming), axis.rank
    sending = all_to_all([part.view(-1) for part in to], [part.view(-1) for part in come], axis, tag)
    come[rank].copy_(to[rank])  # overlaps with the exchange
    sending.wait()
    return received


def _needed(index: Tensor, experts: list[int]) -> Tensor:
    """Return [ranks, T]: whether a rank has an expert of a token; index [T, k]."""
    rank_of = torch.cat([index.new_full((count,), rank) for rank, count in enumerate([*experts, 1])])
    needed = index.new_zeros(len(experts) + 1, len(index), dtype=torch.bool)
    return needed.scatter_(0, rank_of[index].t(), True)[:-1]


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


def _rehearsed(index: Tensor, experts: list[int], rank: int) -> Tensor:
    """Return made-up experts [T, k], as a rehearsal has no values to route by. Other ranks send this rank as
    many rows as it sends itself: this rank's experts are chosen by as many tokens as if choices were independent.
    """
    tokens, k = index.shape
    count, first = experts[rank], sum(experts[:rank])
    own = min(tokens * k, round(tokens * k * _load * count / sum(experts)))
    with_own = max(1, -(-own // k), round(tokens * (1 - (1 - own / max(1, tokens * k)) ** k)))
    token = torch.arange(tokens, device=index.device)[:, None]
    choice = torch.arange(k, device=index.device)[None]
    place = choice * with_own + token  # spread over the first `with_own` tokens, first choices first
    mine = (token < with_own) & (place < own)
    others = first + count + (token * k + choice) % max(1, sum(experts) - count)
    return (first + place % count).where(mine, others % sum(experts))


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
