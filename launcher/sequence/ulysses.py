"""Ulysses: around attention, ranks exchange some tokens of all heads for all tokens of some heads, and back.

Every rank gets the same number of query heads, and the key-value heads that they read. If there are fewer
key-value heads than ranks, neighbouring ranks get the same one, and its gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from launcher.comm import Axis, all_to_all

TAG = "attention/ulysses"
Heads = tuple[slice, ...]  # of each rank


def query_heads(heads: int, ranks: int) -> Heads:
    """Return the query heads of each rank; `ranks` divides `heads`."""
    size = heads // ranks
    return tuple(slice(rank * size, (rank + 1) * size) for rank in range(ranks))


def key_heads(heads: int, groups: int, ranks: int) -> Heads | None:
    """Return the key-value heads that each rank's query heads read. None if their numbers are unequal: keys
    and values must then be repeated for each query head first.

    Args:
        heads, groups: query heads and key-value heads.
    """
    size, times = heads // ranks, heads // groups
    if size % times and times % size:
        return None
    return tuple(slice(rank * size // times, -(-(rank + 1) * size // times)) for rank in range(ranks))


def to_heads(x: Tensor, axis: Axis, heads: Heads) -> Tensor:
    """[B, all heads, tokens of this rank, D] -> [B, heads of this rank, tokens of all ranks, D]."""
    if axis.degree == 1:
        return x
    found: Tensor = _ToHeads.apply(x, axis, heads)  # type: ignore[no-untyped-call]
    return found


def to_tokens(x: Tensor, axis: Axis, heads: Heads) -> Tensor:
    """[B, heads of this rank, tokens of all ranks, D] -> [B, all heads, tokens of this rank, D]."""
    if axis.degree == 1:
        return x
    found: Tensor = _ToTokens.apply(x, axis, heads)  # type: ignore[no-untyped-call]
    return found


def out_to_tokens(out: Tensor, lse: Tensor, axis: Axis, heads: Heads) -> Tensor:
    """Return attention in the layout that the next layer expects: [B, tokens of this rank, all heads, E].

    [Note: Attention in backward]
    The gradient of the scores needs the dot product of `out` and its gradient, one number per query and head.
    If it were computed in the backward of attention, `out` would be saved there, in addition to the copy in
    this layout that the next layer saves. So it is computed here and passed back as the gradient of the
    log-sum-exp, by which `out` is normalized.

    Args:
        out, lse: this rank's heads, all ranks' tokens: [B, heads, S, E] and fp32 [B, heads, S].
    """
    found: Tensor = _OutToTokens.apply(out, lse, axis, heads)  # type: ignore[no-untyped-call]
    return found


class _OutToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, axis: Axis, heads: Heads) -> Tensor:
        ctx.axis, ctx.heads = axis, heads
        # [B, H, S / degree, E]
        mine = out if axis.degree == 1 else _gather_heads(out, axis, heads, heads[-1].stop)
        found = mine.transpose(1, 2).contiguous()
        ctx.save_for_backward(found)
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (out,) = ctx.saved_tensors
        # [B, S / degree, H] -> [B, H, S / degree, 1]
        d_lse = -(gradient.float() * out).sum(-1).transpose(1, 2).unsqueeze(-1)
        gradient = gradient.transpose(1, 2)
        if ctx.axis.degree > 1:
            gradient, d_lse = (_gather_tokens(x, ctx.axis, ctx.heads) for x in (gradient, d_lse))
        return gradient, d_lse.squeeze(-1), None, None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, heads: Heads) -> Tensor:
        ctx.axis, ctx.heads, ctx.all_heads = axis, heads, x.shape[1]
        return _gather_tokens(x, axis, heads)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather_heads(gradient, ctx.axis, ctx.heads, ctx.all_heads), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, heads: Heads) -> Tensor:
        ctx.axis, ctx.heads = axis, heads
        return _gather_heads(x, axis, heads, heads[-1].stop)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather_tokens(gradient, ctx.axis, ctx.heads), None, None


def _gather_tokens(x: Tensor, axis: Axis, heads: Heads) -> Tensor:
    mine = x[:, heads[axis.rank]]
    parts = [x[:, own] for own in heads]
    return torch.cat(_exchanged(parts, [mine.shape] * axis.degree, axis), 2)


def _gather_heads(x: Tensor, axis: Axis, heads: Heads, all_heads: int) -> Tensor:
    """Return the tokens of this rank with all heads; heads that several ranks have are summed."""
    parts = list(x.chunk(axis.degree, 2))
    shapes = [_with_heads(parts[axis.rank].shape, own) for own in heads]
    incoming = _exchanged(parts, shapes, axis)
    if all(before.stop == after.start for before, after in pairwise(heads)):
        return torch.cat(incoming, 1)
    whole = x.new_zeros(_with_heads(shapes[0], slice(0, all_heads)))
    for own, part in zip(heads, incoming, strict=True):
        whole[:, own] += part
    return whole


def _exchanged(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis) -> list[Tensor]:
    """Send each rank its part, and return the parts of these shapes received from all ranks.

    This rank's own part is not copied, and send buffers are freed before the caller concatenates the
    result."""
    mine, nothing = parts[axis.rank], parts[axis.rank].new_empty(0)
    outgoing = [nothing if rank == axis.rank else part.contiguous() for rank, part in enumerate(parts)]
    incoming = [nothing if rank == axis.rank else mine.new_empty(shape) for rank, shape in enumerate(shapes)]
    all_to_all([part.view(-1) for part in outgoing], [part.view(-1) for part in incoming], axis, TAG).wait()
    incoming[axis.rank] = mine
    return incoming


def _with_heads(shape: Sequence[int], heads: slice) -> list[int]:
    return [shape[0], heads.stop - heads.start, *shape[2:]]
