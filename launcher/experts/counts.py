"""Counts how often each number occurs, such as the tokens of each expert."""

from __future__ import annotations

import torch
from torch import Tensor


def counts_of(values: Tensor, size: int) -> Tensor:
    """Return how often each of 0 .. size - 1 occurs in `values` [n], as integers [size].

    torch.bincount computes the largest value first, which would make the host wait for the device.
    """
    if values.device.type == "cpu":
        return torch.bincount(values, minlength=size)
    return values.new_zeros(size).index_add_(0, values, torch.ones_like(values))
