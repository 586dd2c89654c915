"""The elements of a logical parameter that a rank of the tp axis holds.

Terms of this package:

logical       the whole parameter, as in the model before the split
local         the shard that this rank holds: its parts, concatenated along one dim
part          a range of that dim; several if the parameter is packed (gate and up, or q, k and v, in one)
holders       number of ranks that hold a part: 1, all (a replicated parameter), or some (few key-value heads)
partial       gradients on the holders must be summed, because each rank had only a slice of the activations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm import Axis, all_reduce
from launcher.tensor.rectangles import Rectangle, rectangles

# Reads a box of a logical parameter: (offsets, sizes) -> tensor of shape `sizes`.
BoxReader = Callable[[Sequence[int], Sequence[int]], Tensor]


def is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether the elements of a parameter are packed bytes (bitsandbytes' 4-bit weights), not numbers."""
    return hasattr(parameter, "quant_state")


def whole_numel(parameter: nn.Parameter) -> int:
    """Return the number of weights of a parameter, packed or not."""
    packed: Any = parameter
    return int(packed.quant_state.shape.numel()) if is_quantized(parameter) else parameter.numel()


@dataclass(frozen=True)
class DimSlice:
    """The range [start, stop) along the split dim.

    Args:
        start, stop: indices in the logical parameter.
        holders: number of ranks that hold this range.
        group: index of the group of ranks that hold this range; 0 .. degree / holders - 1.
        first: whether this rank is the first holder, which writes the range into checkpoints.
    """

    start: int
    stop: int
    holders: int = 1
    group: int = 0
    first: bool = True

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Box:
    """A box of the logical parameter inside a box of the local one.

    Args:
        offsets, sizes: in the logical parameter.
        outer: the enclosing box of the local parameter, whose elements are contiguous in memory.
        at: start of this box in `outer` along the split dim; in the other dims both are equal.
        part: the part that this box belongs to.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    outer: Rectangle
    at: int
    part: DimSlice


@dataclass(frozen=True)
class Split:
    """A rank's shard of one parameter.

    Args:
        shape: logical shape.
        parts: the parts, in their order in the local parameter.
        dim: the dim along which they are concatenated.
        partial: see the module's terms; irrelevant for parts with one holder.
        padded_numel: number of elements of the largest shard of any rank. Flat buffers reserve this many, so
            that their layout is the same on all ranks of the axis.
    """

    shape: torch.Size
    parts: tuple[DimSlice, ...]
    dim: int = 0
    partial: bool = False
    padded_numel: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int], axis: Axis | None = None, *, partial: bool = False) -> Split:
        """Return the split of a parameter that every rank of the axis holds whole."""
        degree, rank = (1, 0) if axis is None else (axis.degree, axis.rank)
        part = DimSlice(0, shape[0] if len(shape) else 1, degree, 0, rank == 0)
        return cls(torch.Size(shape), (part,), partial=partial, padded_numel=math.prod(shape))

    @property
    def local_shape(self) -> torch.Size:
        if not self.shape:
            return self.shape
        sizes = list(self.shape)
        sizes[self.dim] = sum(part.size for part in self.parts)
        return torch.Size(sizes)

    @property
    def numel(self) -> int:
        """Return the number of elements of the local parameter."""
        return math.prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    def take(self, logical: Tensor) -> Tensor:
        """Return the local part of a logical tensor: the tensor itself if that is all of it, else a copy."""
        if self.is_whole:
            return logical
        return torch.cat([logical.narrow(self.dim, part.start, part.size) for part in self.parts], self.dim)

    def put(self, local: Tensor, logical: Tensor, *, first_only: bool = False) -> None:
        """Copy the local parameter to its place in a logical tensor.

        Args:
            first_only: skip parts of which another rank is the first holder.
        """
        if not self.shape:
            if self.parts[0].first or not first_only:
                logical.copy_(local)
            return
        at = 0
        for part in self.parts:
            if part.first or not first_only:
                source = local.narrow(self.dim, at, part.size)
                logical.narrow(self.dim, part.start, part.size).copy_(source)
            at += part.size

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the elements [start, stop) of the flattened local parameter as boxes of the logical one."""
        for outer in rectangles(self.local_shape, start, stop):
            if not self.shape:
                yield Box((), (), outer, 0, self.parts[0])
                continue
            low = outer.offsets[self.dim]
            high = low + outer.sizes[self.dim]
            begin = 0
            for part in self.parts:
                first, last = max(low, begin), min(high, begin + part.size)
                if first < last:
                    offsets, sizes = list(outer.offsets), list(outer.sizes)
                    offsets[self.dim] = part.start + first - begin
                    sizes[self.dim] = last - first
                    yield Box(tuple(offsets), tuple(sizes), outer, first - low, part)
                begin += part.size

    def view(self, flat: Tensor, start: int, box: Box) -> Tensor:
        """Return `box` as a view, in its shape, of `flat`, which holds the local elements from `start` on."""
        outer = flat[box.outer.flat_start - start : box.outer.flat_stop - start].view(box.outer.sizes)
        return outer.narrow(self.dim, box.at, box.sizes[self.dim]) if self.shape else outer

    def read(self, start: int, stop: int, read: BoxReader) -> Tensor:
        """Return the elements [start, stop) of the flattened local parameter, read box by box: [stop - start]."""
        boxes = list(self.boxes(start, stop))
        if len(boxes) == 1 and math.prod(boxes[0].sizes) == stop - start:
            return read(boxes[0].offsets, boxes[0].sizes).reshape(-1)
        flat: Tensor | None = None
        for box in boxes:
            values = read(box.offsets, box.sizes)
            if flat is None:
                flat = torch.empty(stop - start, dtype=values.dtype, device=values.device)
            self.view(flat, start, box).copy_(values.view(box.sizes))
        return torch.empty(0) if flat is None else flat

    def shared(self, start: int, stop: int) -> Iterator[tuple[int, int, DimSlice]]:
        """Yield ranges of the flattened local parameter inside [start, stop) that several ranks hold."""
        if all(part.holders == 1 for part in self.parts):
            return
        inner = math.prod(self.shape[self.dim + 1 :]) if self.shape else 1
        row = inner * sum(part.size for part in self.parts)
        at = start // row * row if row else 0
        while at < stop:
            for part in self.parts:
                low, high = max(at, start), min(at + part.size * inner, stop)
                if part.holders > 1 and low < high:
                    yield low, high, part
                at += part.size * inner


def whole(local: Tensor, split: Split, axis: Axis) -> Tensor:
    """Return the logical tensor on every rank: `local` itself if every rank holds all of it, else a new
    tensor. A collective.

    Each element comes from its first holder, and all other ranks add zero, so the values are exact.
    """
    if split.is_whole and all(part.holders == axis.degree for part in split.parts):
        return local
    logical = local.new_zeros(split.shape)
    split.put(local, logical, first_only=True)
    all_reduce(logical.view(-1), axis, "whole").wait()
    return logical
