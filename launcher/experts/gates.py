"""Gates with a capacity: choose and weight the experts of each token, and drop excess pairs.

An expert's capacity limits the tokens that it takes from a rank's batch, so that no rank waits long for
another (Lepikhin et al. 2020, arXiv:2006.16668). `top1`, `top2` and `topk` choose, weight and drop exactly as
DeepSpeed's gates of these names, including their random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.experts.counts import counts_of

MOST = 1 << 40  # upper bound of a capacity
DROPPED = -1
"""Replaces the number of an expert: no expert takes this pair."""


@dataclass(frozen=True)
class Gating:
    """A gate's decision for T tokens.

    Args:
        loss: load-balancing loss, a scalar; 1 if all experts get the same number of tokens.
        experts: [T, k]; `DROPPED` where an expert was full.
        weights: [T, k], fp32.
        places: [T, k], the index of a token among the tokens that its expert takes.
        counts: [experts], tokens routed to each expert before any is dropped.
        capacity: maximum number of tokens per expert.
    """

    loss: Tensor
    experts: Tensor
    weights: Tensor
    places: Tensor
    counts: Tensor
    capacity: int


def capacity_of(tokens: int, experts: int, factor: float, least: int = 0) -> int:
    """Return how many tokens an expert takes at most: `factor` times an even share, and at least `least`."""
    share = float(torch.tensor(tokens / experts) * torch.tensor(factor))  # in fp32, as it is rounded up
    return max(math.ceil(min(share, MOST)), least)


def top1(
    logits: Tensor,
    factor: float,
    least: int,
    *,
    used: Tensor | None = None,
    noise: bool = False,
    drop: bool = True,
    random: bool = True,
) -> Gating:
    """Return one expert for each token (Fedus et al. 2021, arXiv:2101.03961), weighted by its probability.

    Args:
        logits: [T, experts], fp32.
        factor: capacity factor.
        least: minimum capacity.
        used: [T], 0 for tokens that no expert should take.
        noise: add Gumbel noise before choosing an expert.
        drop: enforce the capacity.
        random: a full expert keeps random tokens instead of the first ones.
    """
    noisy = logits + _gumbel(logits) if noise else None
    shares = logits.softmax(1)
    chosen = (shares if noisy is None else noisy).argmax(1)
    wanted = F.one_hot(chosen, logits.shape[1])
    if used is not None:
        wanted = wanted * used.to(wanted.dtype)[:, None]
    counts = wanted.sum(0).detach()
    loss = (shares.mean(0) * wanted.float().mean(0)).sum() * logits.shape[1]
    capacity = capacity_of(len(logits), logits.shape[1], factor, least) if drop else int(counts.max())
    order = wanted * torch.rand(wanted.shape, device=logits.device) if random else wanted
    taken = wanted * _of_first(order, capacity)
    kept = taken.sum(1, keepdim=True) > 0
    places = (taken.cumsum(0) - 1).gather(1, chosen[:, None]) * kept
    weights = shares.gather(1, chosen[:, None]) * kept
    return Gating(loss, chosen[:, None].where(kept, DROPPED), weights, places, counts, capacity)


def top2(logits: Tensor, factor: float, least: int, *, drop: bool = True, sample: bool = True) -> Gating:
    """Return two experts for each token, weighted by their softmax probabilities. A full expert takes the
    first tokens: those whose first choice it is, then those whose second choice it is.

    Args:
        sample: choose the second expert at random, according to its probability.
    """
    shares = logits.softmax(1)
    first = shares.argmax(1)
    wanted_first = F.one_hot(first, logits.shape[1])
    others = logits + _gumbel(logits) if sample else logits
    second = others.masked_fill(wanted_first.bool(), -math.inf).argmax(1)
    wanted_second = F.one_hot(second, logits.shape[1])
    of_first = wanted_first.cumsum(0) - 1
    of_second = wanted_second.cumsum(0) - 1 + wanted_first.sum(0, keepdim=True)
    counts = (wanted_first + wanted_second).sum(0).detach()
    loss = (shares.mean(0) * wanted_first.float().mean(0)).mean() * logits.shape[1] ** 2
    capacity = capacity_of(len(logits), logits.shape[1], factor * 2, least) if drop else int(counts.max())
    experts = torch.stack([first, second], 1)
    places = torch.stack([of_first.gather(1, first[:, None]), of_second.gather(1, second[:, None])], 1)[
        ..., 0
    ]
    return _weighed(loss, shares, experts, places, places < capacity, counts, capacity)


def topk(
    logits: Tensor, k: int, factor: float, least: int, *, drop: bool = True, first_come: bool = False
) -> Gating:
    """Return k experts for each token, weighted by their softmax probabilities.

    Args:
        first_come: a full expert takes the first tokens instead of those with the largest probabilities.
    """
    shares = logits.softmax(1)
    largest, experts = shares.topk(k, dim=1)
    wanted = torch.zeros_like(shares, dtype=torch.bool).scatter_(1, experts, True)
    counts = wanted.sum(0).detach()
    loss = (shares.mean(0) * wanted.float().mean(0)).mean() * logits.shape[1] ** 2 / k
    capacity = capacity_of(len(logits), logits.shape[1], factor * k, least) if drop else int(counts.max())
    if drop and not first_come:
        wanted = wanted & _of_first(torch.zeros_like(shares).scatter(1, experts, largest), capacity).bool()
    of_experts = wanted.cumsum(0) - 1
    kept = (wanted & (of_experts < capacity)).gather(1, experts)
    return _weighed(loss, shares, experts, of_experts.gather(1, experts), kept, counts, capacity)


def keep_heaviest(experts: Tensor, weights: Tensor, count: int, capacity: int) -> Tensor:
    """Return the router's choices [T, k], with `DROPPED` for the pairs that exceed an expert's capacity:
    those with the smallest weights.

    Args:
        experts: [T, k]; numbers outside of 0 .. count - 1 denote no expert.
        weights: [T, k].
        count: number of all experts.
    """
    flat, known = experts.flatten(), ((experts >= 0) & (experts < count)).flatten()
    # sort by expert, then by weight: the second sort is stable
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    named = flat.where(known, count)[by_weight]
    order = by_weight[named.argsort(stable=True)]
    counts = counts_of(named, count + 1)
    place = (
        torch.arange(len(flat), device=flat.device)
        - (counts.cumsum(0) - counts)[flat.where(known, count)[order]]
    )
    kept = torch.empty_like(known)
    kept[order] = place < capacity
    return experts.where((kept & known).view_as(experts), DROPPED)


def _weighed(
    loss: Tensor, shares: Tensor, experts: Tensor, places: Tensor, kept: Tensor, counts: Tensor, capacity: int
) -> Gating:
    """Return a gating in which the weights of a token's kept experts sum to 1."""
    weights = shares.gather(1, experts) * kept
    weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return Gating(loss, experts.where(kept, DROPPED), weights, places * kept, counts, capacity)


def _of_first(values: Tensor, count: int) -> Tensor:
    """Return [T, experts]: 1 for the `count` largest values of each column."""
    largest = values.topk(min(count, len(values)), dim=0)[1]
    return torch.zeros_like(values, dtype=torch.int64).scatter_(0, largest, 1)


def _gumbel(like: Tensor) -> Tensor:
    zero, one = like.new_zeros(()), like.new_ones(())
    drawn: Tensor = torch.distributions.Gumbel(zero, one).rsample(like.shape)
    return drawn
