"""Finds each parameter's elements in DeepSpeed's files, as boxes of logical tensors.

- Stages 1 and 2: the parameters of a group are concatenated in one flat tensor; each rank wrote a range.
- Stage 3: each parameter is split into as many equal parts as there are ranks (the last one padded); a rank
  wrote its parts concatenated, in one or more sub-groups.
- Stage 0: unsharded tensors, per parameter in fp32, per param group if the model is in 16 bits.

Optimizer states have the same layout as the weights that the optimizer updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from launcher.tensor.rectangles import rectangles

LOOKED_AT = 8
"""`StoredTensor.looks_like` compares about this many elements of each part."""
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Part:
    """A box of a logical tensor, and its elements.

    Args:
        offsets, sizes: of the box.
        data: [sizes], a view of a file.
        scale: `data` is the box multiplied by this.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Tensor
    scale: float = 1.0


@dataclass
class StoredTensor:
    """A logical tensor, stored in parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part] = field(default_factory=list)

    @cached_property
    def by_offsets(self) -> dict[tuple[int, ...], Part]:
        """Return {offsets: part}; cached, so all parts must have been added."""
        return {part.offsets: part for part in self.parts}

    @cached_property
    def entry(self) -> TensorStorageMetadata:
        """Return the parts as torch.distributed.checkpoint describes them."""
        chunks = [
            ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in self.parts
        ]
        return TensorStorageMetadata(TensorProperties(dtype=self.dtype), torch.Size(self.shape), chunks)

    @property
    def is_whole(self) -> bool:
        """Return whether the parts cover the whole tensor."""
        return sum(math.prod(part.sizes) for part in self.parts) == math.prod(self.shape)

    def looks_like(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the same values, in its precision.

        Only a few values of each part are compared, so that files are not read completely.
        """
        if tuple(tensor.shape) != self.shape:
            return False
        for part in self.parts:
            box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            step = max(1, part.data.numel() // LOOKED_AT)
            ours, theirs = part.data.reshape(-1)[::step], tensor[box].reshape(-1)[::step]
            if not ours.to(theirs.dtype).equal(theirs):
                return False
        return True


Place = dict[str, StoredTensor]
"""Logical tensors by launcher's names."""


@dataclass(frozen=True)
class FlatRange:
    """A contiguous range of a parameter in a flat tensor.

    Args:
        start, stop: range in the flattened parameter.
        rank, group, at: rank that has the flat tensor, the tensor's index there, and the offset in it.
    """

    name: str
    start: int
    stop: int
    rank: int
    group: int
    at: int


def whole(tensor: Tensor) -> StoredTensor:
    """Return a stored tensor whose only part is `tensor`."""
    shape = tuple(tensor.shape)
    return StoredTensor(shape, tensor.dtype, [Part((0,) * len(shape), shape, tensor)])


def ranges(
    groups: Sequence[Shapes], lengths: Sequence[Sequence[int]], paddings: Sequence[Sequence[int]] | None
) -> Iterator[FlatRange]:
    """Yield the ranges of parameters in flat tensors at stages 1 and 2.

    Args:
        groups: name -> shape, of each param group.
        lengths: of each group, by rank: elements of the range that the rank wrote.
        paddings: of each group, by parameter: unused elements after it.
    """
    for number, shapes in enumerate(groups):
        ends = list(accumulate(lengths[number]))
        begin = 0
        for place, (name, shape) in enumerate(shapes.items()):
            end = begin + math.prod(shape)
            for rank, stop in enumerate(ends):
                first = stop - lengths[number][rank]
                low, high = max(begin, first), min(end, stop)
                if low < high:
                    yield FlatRange(name, low - begin, high - begin, rank, number, low - first)
            begin = end + (paddings[number][place] if paddings else 0)


def equal_parts(groups: Sequence[Shapes], lengths: Sequence[int], ranks: int) -> Iterator[FlatRange]:
    """Yield the ranges of parameters in flat tensors at stage 3.

    Args:
        groups: name -> shape; all groups form one sequence.
        lengths: elements of each sub-group on a rank.
        ranks: number of ranks that wrote.
    """
    sub_group, at = 0, 0
    for shapes in groups:
        for name, shape in shapes.items():
            count = math.prod(shape)
            each = -(-count // ranks)
            while sub_group < len(lengths) - 1 and at >= lengths[sub_group]:
                sub_group, at = sub_group + 1, 0
            for rank in range(ranks):
                start, stop = min(count, rank * each), min(count, (rank + 1) * each)
                if start < stop:
                    yield FlatRange(name, start, stop, rank, sub_group, at)
            at += each


def parts_of(flat_range: FlatRange, shape: Sequence[int], flat: Tensor) -> Iterator[Part]:
    """Yield the boxes of a range, as views of the flat tensor that contains it.

    Raises:
        ValueError: the flat tensor is too short.
    """
    needed = flat_range.at + flat_range.stop - flat_range.start
    if needed > flat.numel():
        raise ValueError(f"the flat tensor has {flat.numel()} elements, but at least {needed} are needed")
    for box in rectangles(shape, flat_range.start, flat_range.stop):
        at = flat_range.at + box.flat_start - flat_range.start
        yield Part(box.offsets, box.sizes, flat[at : at + box.flat_stop - box.flat_start].view(box.sizes))
