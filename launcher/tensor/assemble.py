"""Logical tensors out of what the ranks of the tp axis hold."""

from __future__ import annotations

from torch import Tensor

from launcher.comm import Axis, all_reduce
from launcher.tensor.split import Split


def whole(local: Tensor, split: Split, axis: Axis) -> Tensor:
    """Return the logical tensor, on every rank: `local` itself where every rank holds all of it, else a new tensor. A
    collective.

    Each element comes from its first holder, and the others add zero to it: the values are exact.
    """
    if split.is_whole and all(part.holders == axis.degree for part in split.parts):
        return local
    logical = local.new_zeros(split.shape)
    split.put(local, logical, first_only=True)
    all_reduce(logical.view(-1), axis, "whole").wait()
    return logical
