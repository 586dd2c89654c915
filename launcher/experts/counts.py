"""Counts how often each number occurs: the tokens of each expert."""

from __future__ import annotations

import torch
from torch import Tensor


def counts_of(values: Tensor, size: int) -> Tensor:
    """Return how often each of 0 .. size - 1 is among `values` [n], whole numbers [size].

    torch.bincount looks for the largest value first, for which the host would wait for a device.
    """
    if values.device.type == "cpu":
        return torch.bincount(values, minlength=size)
    return values.new_zeros(size).index_add_(0, values, torch.ones_like(values))
