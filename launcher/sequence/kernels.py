"""Attention of a block of queries to a block of keys with its log-sum-exp, forward and backward.

Given the log-sum-exp, attention to all keys is merged from attention to blocks of them (`merged`), and the
backward of a block needs only the log-sum-exp over all keys (Dao 2023, arXiv:2307.08691, section 3.1). So
blocks may be computed anywhere, in any order.

On CPUs, torch's fused kernel is used if it applies; otherwise plain torch computes tiles of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from launcher.sequence.masks import Block

_TILE = 1 << 24  # elements of one tile of scores
_INF = float("inf")


@dataclass(frozen=True)
class Scores:
    """How the score of a query and a key is computed.

    Args:
        scale: factor of their product.
        cap: scores become cap x tanh(score / cap) (Gemma 2); 0: no cap.
    """

    scale: float
    cap: float = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the attention of a block, and its log-sum-exp.

    Args:
        query: [B, H, Q, D].
        key, value: [B, G, K, D] and [B, G, K, E]; G divides H.
        block: allows at least one pair.

    Returns:
        ([B, H, Q, E] in fp32 or the dtype of the query, fp32 [B, H, Q]): 0 and -inf for a query without keys.
    """
    if _is_fused(query, scores):
        if not _takes_groups():
            key, value = _heads(key, query), _heads(value, query)
        wide, bias = _padded(value, query), _bias(block, query.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, wide, 0.0, block.causal, attn_mask=bias, scale=scores.scale
        )
        out, lse = out[..., : value.shape[-1]], lse.float()
        if block.mask is not None:  # the kernel returns 0 for a query without keys
            lse = lse.masked_fill(~block.mask.any(-1), -_INF)
        return out, lse
    out = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for rows in _tiles(query, key):
        raw = _raw(query[:, :, rows], key, scores)
        weights = _masked(_capped(raw, scores), block, rows)
        lse[:, :, rows] = weights.logsumexp(-1)
        weights = weights.sub_(_finite(lse[:, :, rows])[..., None]).exp_()
        out[:, :, rows] = weights @ _heads(value, query).float()
    return out, lse


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    d_lse: Tensor,
    block: Block,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value through a block, in fp32 or the dtype of the query.

    Args:
        gradient: [B, H, Q, E], the gradient of attention to all keys, in the dtype of the query.
        lse: fp32 [B, H, Q], over all keys.
        d_lse: gradient of `lse`, fp32 [B, H, Q]: the effect of a key on the softmax denominator.
    """
    groups = key.shape[1]
    lse = _finite(lse)
    if _is_fused(query, scores):
        wide, gradient = value.shape[-1], _padded(gradient, query)
        if not _takes_groups():
            key, value = _heads(key, query), _heads(value, query)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            query,
            key,
            _padded(value, query),
            _in_place_of_out(gradient, d_lse),
            lse,
            0.0,
            block.causal,
            attn_mask=_bias(block, query.dtype),
            scale=scores.scale,
        )
        return found[0], _summed(found[1], groups), _summed(found[2][..., :wide], groups)
    keys, values = _heads(key, query).float(), _heads(value, query).float()
    d_query, d_key, d_value = (
        torch.empty_like(query, dtype=torch.float32),
        torch.zeros_like(keys),
        torch.zeros_like(values),
    )
    for rows in _tiles(query, key):
        upstream, raw = gradient[:, :, rows].float(), _raw(query[:, :, rows], key, scores)
        weights = _masked(_capped(raw, scores), block, rows).sub_(lse[:, :, rows, None]).exp_()
        d_value += weights.transpose(-1, -2) @ upstream
        d_scores = weights.mul_(upstream @ values.transpose(-1, -2) + d_lse[:, :, rows, None])
        if scores.cap:
            d_scores = d_scores * (1 - (raw / scores.cap).tanh().square())
        d_scores = d_scores.mul_(scores.scale)
        d_query[:, :, rows] = d_scores @ keys
        d_key += d_scores.transpose(-1, -2) @ query[:, :, rows].float()
    return d_query, _summed(d_key, groups), _summed(d_value, groups)


def merged(out: Tensor, lse: Tensor, more: Tensor, lse_of_more: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention to two sets of keys: return [B, H, Q, E] and [B, H, Q], fp32."""
    total = torch.logaddexp(lse, lse_of_more)
    shift = _finite(total)
    return out * (lse - shift).exp()[..., None] + more * (lse_of_more - shift).exp()[..., None], total


def _is_fused(query: Tensor, scores: Scores) -> bool:
    return query.device.type == "cpu" and not scores.cap


@cache
def _takes_groups() -> bool:
    """Return whether torch's kernel supports fewer key heads than query heads, and sums their gradients."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 2, 4, generator=g) for heads in (2, 1, 1))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = []
    for keys, values in ((key, value), (key.expand(1, 2, 2, 4), value.expand(1, 2, 2, 4))):
        try:
            out, lse = kernel(query, keys, values, 0.0, False)
            parts = getattr(torch.ops.aten, f"{kernel.__name__}_backward")(
                out, query, keys, values, out, lse, 0.0, False
            )
        except RuntimeError:
            return False
        found.append([out, *(part.sum(1, keepdim=True) for part in parts)])
    return all(torch.allclose(one, other) for one, other in zip(*found, strict=True))


def _in_place_of_out(gradient: Tensor, d_lse: Tensor) -> Tensor:
    """Return a tensor whose dot product with the gradient is -d_lse: torch's kernel uses `out` only there."""
    largest = gradient.abs().amax(-1, keepdim=True).float()  # squares of small numbers would underflow
    direction = (gradient / largest).masked_fill_(largest == 0, 0)
    length = direction.square().sum(-1, keepdim=True, dtype=torch.float32)
    factor = (-d_lse[..., None] / (largest * length)).masked_fill_(largest == 0, 0)
    return direction.mul_(factor).to(gradient.dtype)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0. For a query that sees no key, exp(-inf - 0) is 0, but exp(-inf + inf) is NaN."""
    return lse.masked_fill(lse == -_INF, 0)


def _bias(block: Block, dtype: torch.dtype) -> Tensor | None:
    if block.mask is None:
        return None
    return torch.zeros(block.mask.shape, dtype=dtype, device=block.mask.device).masked_fill_(
        ~block.mask, -_INF
    )


def _padded(value: Tensor, query: Tensor) -> Tensor:
    """Pad the values to the head dim of the queries, as the fused kernel requires (DeepSeek's are
    narrower)."""
    more = query.shape[-1] - value.shape[-1]
    return torch.nn.functional.pad(value, (0, more)) if more else value  # padding by 0 would copy


def _heads(grouped: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of each group for its query heads: [B, G, K, D] -> [B, H, K, D]."""
    times = query.shape[1] // grouped.shape[1]
    return grouped if times == 1 else grouped.repeat_interleave(times, 1)


def _summed(gradient: Tensor, groups: int) -> Tensor:
    """Sum the gradients of each group: [B, H, K, D] -> [B, G, K, D]."""
    return gradient if gradient.shape[1] == groups else gradient.float().unflatten(1, (groups, -1)).sum(2)


def _tiles(query: Tensor, key: Tensor) -> Iterator[slice]:
    batch, heads, length, _ = query.shape
    step = max(1, _TILE // (batch * heads * key.shape[2]))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _raw(query: Tensor, key: Tensor, scores: Scores) -> Tensor:
    return (query.float() @ _heads(key, query).float().transpose(-1, -2)).mul_(scores.scale)


def _capped(raw: Tensor, scores: Scores) -> Tensor:
    return (raw / scores.cap).tanh_().mul_(scores.cap) if scores.cap else raw.clone()


def _masked(weights: Tensor, block: Block, rows: slice) -> Tensor:
    if block.causal:
        length = weights.shape[-1]
        places = torch.arange(length, device=weights.device)
        return weights.masked_fill_(places[None, :] > places[rows, None], -_INF)
    return weights if block.mask is None else weights.masked_fill_(~block.mask[:, :, rows], -_INF)
