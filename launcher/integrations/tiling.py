"""`deepspeed.zero.TiledLinear`: a linear layer split into several, so that ZeRO-3 gathers one at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from launcher.errors import ConfigError
from launcher.integrations.utilities import partition_uniform
from launcher.zero.features.context import GatheredParameters


class TilesError(ConfigError, RuntimeError):
    """The features cannot be split into the given number of parts."""


class TiledLinear(nn.Module):
    """Computes y = x W^T + b with `out_splits` x `in_splits` separate layers.

    Args:
        in_features, out_features: sizes of the full layer.
        bias: add a bias; the last layer of each output part holds it, as in DeepSpeed.
        in_splits, out_splits: number of parts of the input and of the output.
        input_is_already_split: forward takes a list of parts.
        combine_out_splits: forward returns one tensor; false: a list of parts.
        linear_cls: class of the separate layers.
        init_linear: a layer to copy the values from.

    Raises:
        TilesError: there are fewer features than parts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, parts, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= parts <= features:
                raise TilesError(
                    f"{name}_splits: {features} features cannot be split into {parts} parts",
                    where="TiledLinear()",
                    fix=f"use a number from 1 to {features}",
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(ins, outs, bias=bias and number == in_splits - 1, **kwargs)
                for number, ins in enumerate(_widths(self.in_parts))
            )
            for outs in _widths(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        if self.in_splits == 1 or self.input_is_already_split:
            inputs = list(input_) if self.input_is_already_split else [input_]
        else:
            inputs = split_tensor_along_last_dim(input_, _widths(self.in_parts))
        if len(inputs) != self.in_splits:
            raise ConfigError(
                f"the input has {len(inputs)} parts, but in_splits is {self.in_splits}",
                where="TiledLinear.forward()",
            )
        rows = [
            self._reduced([layer(part) for layer, part in zip(row, inputs, strict=True)])
            for row in self._rows()
        ]
        return self._combine(rows) if self.combine_out_splits else rows

    def _rows(self) -> list[Any]:
        return list(self.linears)

    def _reduced(self, outputs: list[Any]) -> Any:
        """Return the sum over the input parts."""
        return sum(outputs[1:], outputs[0])

    def _combine(self, rows: list[Any]) -> Any:
        return torch.cat(rows, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Copy the values of a layer with `weight` [out, in] and `bias` [out]."""
        mine = [param for param in self.parameters() if hasattr(param, "ds_id")]
        theirs = [param for param in other.parameters() if hasattr(param, "ds_id")]
        with GatheredParameters([*mine, *theirs], modifier_rank=0):
            for row, (top, bottom) in zip(self._rows(), pairwise(self.out_parts), strict=True):
                for number, (layer, (left, right)) in enumerate(
                    zip(row, pairwise(self.in_parts), strict=True)
                ):
                    layer.weight.copy_(other.weight[top:bottom, left:right])
                    if (
                        self.use_bias
                        and number == self.in_splits - 1
                        and getattr(other, "bias", None) is not None
                    ):
                        layer.bias.copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` whose layers return (output, bias); biases are not added."""

    def _reduced(self, outputs: list[Any]) -> Any:
        products, biases = zip(*outputs, strict=True)
        there = [bias for bias in biases if bias is not None]
        return sum(products[1:], products[0]), there[0] if there else None

    def _combine(self, rows: list[Any]) -> Any:
        products, biases = zip(*rows, strict=True)
        whole = torch.cat(products, dim=-1)
        return whole, None if any(bias is None for bias in biases) else torch.cat(biases, dim=-1)


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: list[int] | tuple[int, ...], contiguous_split_chunks: bool = False
) -> list[Tensor]:
    """Split a tensor along the last dim into parts of the given widths."""
    parts = torch.split(tensor, list(partitions), dim=-1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else list(parts)


def _widths(bounds: list[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(bounds)]
