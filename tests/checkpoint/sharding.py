"""Logical tensors, and each rank's share of them."""

from __future__ import annotations

import torch

from launcher.checkpoint.slices import FlatSlice

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (7, 5),
    "cube": (3, 4, 5),
    "vector": (11,),
    "one": (1,),
    "scalar": (),
    "empty": (0, 4),
}


def whole(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The logical tensor: different numbers in every element, exact in bfloat16."""
    shape = SHAPES[name]
    return (torch.arange(torch.Size(shape).numel()) + len(name)).view(shape).to(dtype)


def bounds(numel: int, rank: int, world: int) -> tuple[int, int]:
    """Even slices of a padded flat buffer: the last ranks may have little or nothing."""
    size = -(-numel // world)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def share(name: str, rank: int, world: int, dtype: torch.dtype = torch.float32) -> FlatSlice:
    flat = whole(name, dtype).reshape(-1)
    start, stop = bounds(flat.numel(), rank, world)
    return FlatSlice(flat[start:stop].clone(), SHAPES[name], start, stop)


def blank(name: str, rank: int, world: int, dtype: torch.dtype = torch.float32) -> FlatSlice:
    start, stop = bounds(whole(name).numel(), rank, world)
    return FlatSlice(torch.full((stop - start,), -1.0, dtype=dtype), SHAPES[name], start, stop)
