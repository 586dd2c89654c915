"""`deepspeed.moe.sharded_moe`: the gating functions, for scripts that call them directly."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from launcher.experts import gates


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """Select one expert per token; see `_told` for the result."""
    noise = noisy_gate_policy == "RSample"
    found = gates.top1(
        logits, capacity_factor, min_capacity, used=used_token, noise=noise, drop=drop_tokens, random=use_rts
    )
    return _told(found, logits, drop_tokens, ep_group, sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Select two experts per token; see `_told` for the result."""
    found = gates.top2(
        logits, capacity_factor, min_capacity, drop=drop_tokens, sample=top2_2nd_expert_sampling
    )
    return _told(found, logits, drop_tokens, ep_group, sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Select k experts per token; see `_told` for the result.

    Raises:
        ValueError: drop_policy is neither "probs" nor "position".
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f'drop_policy is {drop_policy!r}: it must be "probs" or "position"')
    first = drop_policy == "position"
    found = gates.topk(logits, k, capacity_factor, min_capacity, drop=drop_tokens, first_come=first)
    return _told(found, logits, drop_tokens, ep_group, sparse_routes)


def _told(found: gates.Gating, logits: Tensor, drop: bool, group: Any, sparse: bool) -> tuple[Any, ...]:
    """Return a gating decision in DeepSpeed's form.

    Dense: (loss, weights [T, experts, capacity], mask of nonzero weights, tokens per expert before dropping).
    Sparse: (loss, capacity, number of experts, expert indices [k, T], places [k, T], weights [k, T], tokens
    per expert before dropping).

    Args:
        group: ranks that use the same capacity if no tokens are dropped.
    """
    capacity = found.counts.new_tensor(found.capacity)
    if not drop and group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=group)
    if sparse:
        numbers, places = found.experts.t().int(), found.places.t().int()
        return found.loss, capacity, logits.shape[1], numbers, places, found.weights.t(), found.counts
    tokens, _ = found.experts.shape
    kept = found.experts >= 0
    dense = logits.new_zeros(tokens, logits.shape[1], int(capacity))
    rows = kept.nonzero()[:, 0]
    dense = dense.index_put((rows, found.experts[kept], found.places[kept]), found.weights[kept])
    return found.loss, dense, dense.bool(), found.counts
