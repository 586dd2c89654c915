"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: computation over long sequences in tiles, on one rank.

`TiledMLP`, `TiledFusedLogitsLoss` and `sequence_tiled_compute` need no communication. A tile's forward is
recomputed in its backward, so that activations are stored for one tile at a time. Gradients equal those of
the untiled function. Source: Bekman et al. 2025, arXiv:2506.13996.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from launcher.errors import ArgumentsError


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Return fn(**kwargs), computed in tiles along dimension 1.

    Args:
        fn: returns a tensor; a scalar if output_unshard_dimension is 0.
        seqlen: unused.
        shards: number of tiles; the last one may be shorter.
        kwargs_to_shard: tensors [batch, sequence, ...] that are split into tiles.
        kwargs_to_pass: arguments that every tile gets unchanged.
        grad_requiring_tensor_key, compute_params: unused; autograd tracks what needs a gradient.
        output_unshard_dimension: dimension along which the outputs of the tiles are concatenated.
        output_reduction: "mean" or "sum" over the concatenated outputs, or None.
    """
    cut = {key: value.chunk(shards, dim=1) for key, value in kwargs_to_shard.items()}
    tiles = [dict(zip(cut, parts, strict=True)) for parts in zip(*cut.values(), strict=True)]
    outputs = [_tile(fn, **tile, **kwargs_to_pass) for tile in tiles]
    if output_unshard_dimension == 0:
        outputs = [output.unsqueeze(0) for output in outputs]
    return _reduced(torch.cat(outputs, dim=output_unshard_dimension), output_reduction)


class SequenceTiledCompute:
    """`sequence_tiled_compute` with keywords passed as lists of keys."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: list[str],
        keys_to_pass: list[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """Return the result of `sequence_tiled_compute`; `args` are the values of both lists of keys."""
        values = dict(zip([*keys_to_shard, *keys_to_pass], args, strict=True))
        cut, passed = ({key: values[key] for key in keys} for keys in (keys_to_shard, keys_to_pass))
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            cut,
            passed,
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """The MLP of a block, computed in tiles along the sequence."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Return fn(self, x).

        Args:
            fn: the forward of the module `self`.
            x: [..., sequence, hidden].
            shards: number of tiles; the last one may be shorter.
            compute_params: unused.
        """
        return torch.cat([_tile(fn, self, tile) for tile in x.chunk(shards, dim=-2)], dim=-2)


class AutogradComputeMLP:
    """The MLP of a block, whose forward is recomputed in its backward."""

    @staticmethod
    def apply(fn: Callable[..., Tensor], self: Any, x: Tensor) -> Tensor:
        """Return fn(self, x)."""
        return _tile(fn, self, x)


class TiledFusedLogitsLoss:
    """A loss whose logits are materialized for one tile at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Iterable[Tensor] | None,
        output_reduction: str,
    ) -> Tensor:
        """Return the losses of all tiles, reduced.

        Args:
            fn: fn(self, x, y[, mask]) returns the loss of the given rows.
            x, y: [batch, sequence, ...]; the first two dimensions are flattened, so a tile is [rows, ...].
            mask: [batch, sequence], or None.
            shards: number of tiles; the last one may be shorter.
            compute_params: unused.
            output_reduction: "mean" of the tiles' losses, with equal weights, or "sum".
        """
        given = [x, y] if mask is None else [x, y, mask]
        if output_reduction not in ("mean", "sum") or any(one.shape[:2] != x.shape[:2] for one in given):
            raise ArgumentsError(
                f"reduction {output_reduction!r} with shapes {[tuple(one.shape) for one in given]} "
                "is not supported",
                where="TiledFusedLogitsLoss.apply()",
                fix='use "mean" or "sum"; x, y and mask must have the same batch and sequence dimensions',
            )
        cut = [one.flatten(0, 1).chunk(shards) for one in given]
        losses = [_tile(fn, self, *tile) for tile in zip(*cut, strict=True)]
        return _reduced(torch.stack(losses), output_reduction)


def _tile(fn: Callable[..., Tensor], *args: Any, **keywords: Any) -> Tensor:
    output: Tensor = checkpoint(fn, *args, use_reentrant=False, **keywords)
    return output


def _reduced(outputs: Tensor, reduction: str | None) -> Tensor:
    if reduction is None:
        return outputs
    if reduction not in ("mean", "sum"):
        raise ArgumentsError(f"unknown reduction {reduction!r}", fix='use "mean", "sum" or None')
    return outputs.mean() if reduction == "mean" else outputs.sum()
