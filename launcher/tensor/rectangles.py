"""Decomposes a flat range of an n-d row-major tensor, such as a flat shard, into axis-aligned boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A box of an n-d tensor whose elements are contiguous in the flattened tensor."""

    offsets: tuple[int, ...]
    """Index of its first element."""
    sizes: tuple[int, ...]
    """Its extent along every dim."""
    flat_start: int
    """Its start in the flattened tensor."""
    flat_stop: int
    """Its end in the flattened tensor: flat_start + product of sizes."""


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Return the flat element range [start, stop) of a tensor of `shape` as disjoint boxes, in flat order.

    There are at most 2n - 1 boxes for n dims: the end of a row, whole rows, and the beginning of a row, where
    the two partial rows are decomposed recursively. An empty range gives [].

    Raises:
        ValueError: the range is not inside the tensor.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) is not inside a tensor of shape {shape}")
    if start == stop:
        return []
    return list(_boxes((), shape, start, stop, 0))


def _boxes(
    lead: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int, base: int
) -> Iterator[Rectangle]:
    """Yield boxes of the non-empty range [start, stop) of the sub-tensor `shape` at index `lead`, flat offset
    `base`."""
    ones = (1,) * len(lead)
    if not shape:
        yield Rectangle(lead, ones, base, base + 1)
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if start % row:
        end = min(stop, (first + 1) * row)
        below = base + first * row
        yield from _boxes((*lead, first), shape[1:], start - first * row, end - first * row, below)
        first += 1
        if end == stop:
            return
    if last > first:
        offsets = (*lead, first, *(0 for _ in shape[1:]))
        yield Rectangle(offsets, (*ones, last - first, *shape[1:]), base + first * row, base + last * row)
    if stop % row:
        yield from _boxes((*lead, last), shape[1:], 0, stop - last * row, base + last * row)
