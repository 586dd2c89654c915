"""Divides a dim among the ranks of an axis: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.comm import Axis
from launcher.tensor.split import DimSlice


class IndivisibleError(ValueError):
    """Raised if the degree does not divide the number of grains of a dim.

    Args:
        count: the number that cannot be divided.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} is not divisible")
        self.count = count


def even_sizes(size: int, degree: int) -> list[int]:
    """Return the sizes of the slices of a dim, as in Tensor.tensor_split: the first may be longer by one."""
    return [size // degree + (rank < size % degree) for rank in range(degree)]


def shares_of(size: int, proportions: Sequence[int]) -> list[int]:
    """Return the sizes of the matrices packed along a dim: 12 elements packed (2, 1, 1) are [6, 3, 3].

    Raises:
        IndivisibleError: `size` is not a multiple of the sum of the proportions.
    """
    total = sum(proportions)
    if size % total:
        raise IndivisibleError(size)
    return [size // total * proportion for proportion in proportions]


def parts_of(
    shares: Sequence[int], axis: Axis, *, grain: int = 1, uneven: bool = False, replicates: bool = False
) -> tuple[DimSlice, ...]:
    """Return this rank's part of each share.

    Args:
        shares: sizes of the packed matrices along the dim; each is divided separately.
        grain: number of elements that stay together (those of a head).
        uneven: parts may differ by one grain.
        replicates: if there are fewer grains than ranks, several ranks hold each grain.

    Raises:
        IndivisibleError: the degree does not divide the grains, and neither `uneven` nor `replicates` allows
            it.
    """
    parts, offset, degree = [], 0, axis.degree
    for share in shares:
        grains, rest = divmod(share, grain)
        if rest:
            raise IndivisibleError(share)
        if grains % degree == 0 or uneven:
            sizes = even_sizes(grains, degree)
            start = offset + grain * sum(sizes[: axis.rank])
            parts.append(DimSlice(start, start + grain * sizes[axis.rank]))
        elif replicates and degree % grains == 0:
            holders = degree // grains
            group, place = divmod(axis.rank, holders)
            start = offset + grain * group
            parts.append(DimSlice(start, start + grain, holders, group, place == 0))
        else:
            raise IndivisibleError(grains)
        offset += share
    return tuple(parts)


def longest(shares: Sequence[int], degree: int, grain: int = 1) -> int:
    """Return the number of elements along the dim of the rank with the most: the first."""
    return sum(grain * max(1, -(-share // grain // degree)) for share in shares)


def valid_degrees(count: int, *, replicates: bool = False) -> list[int]:
    """Return the degrees, up to 64, over which `count` grains can be divided."""
    return [d for d in range(1, 65) if count % d == 0 or (replicates and d % count == 0)]
