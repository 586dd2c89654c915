"""The microbatches of a step: created lazily, and broadcast from the first stage, whose ranks alone read
data, to all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from launcher.comm import Axis, broadcast
from launcher.pipeline.crossing import TensorShape
from launcher.pipeline.plain import packed, unpacked

TAG = "pipeline/batch"
T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence that makes its items lazily, in order, each once. A step thus reads the data of a microbatch
    when its forward starts, and random numbers are drawn in the same order as in a plain loop.

    Args:
        length: the number of items.
        make: makes the item at an index; called with 0, 1, 2, ...
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make
        self._made: list[T] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if index >= self._length:
            raise IndexError(index)
        while len(self._made) <= index:
            self._made.append(self._make(len(self._made)))
        return self._made[index]

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items; make them all before the first is returned. The default loop of `Sequence`
        would take an IndexError from `make` for the end, and would turn its StopIteration into a
        RuntimeError."""
        if self._length:
            self[self._length - 1]
        return iter(self._made)


def share(batches: Any, axis: Axis, device: torch.device) -> Any:
    """Broadcast the microbatches of stage 0 to every stage: their structure, then all bytes at once.

    Args:
        batches: any nest of tensors and plain data, on `device`; read on rank 0 of the axis only, except in a
            rehearsal, where the axis has no group and `batches` is returned as it is.
        axis: the pp axis; every rank must call it.
    """
    if axis.group is None:
        return batches
    first = axis.rank == 0
    nest = _share_nest(tree_map(_shape_of_tensor, batches) if first else None, axis, device)
    leaves, spec = tree_flatten(nest)
    if first:
        tensors = [leaf for leaf in tree_flatten(batches)[0] if isinstance(leaf, Tensor)]
    else:
        shapes = [leaf for leaf in leaves if isinstance(leaf, TensorShape)]
        tensors = [torch.empty(shape.size, dtype=shape.dtype, device=device) for shape in shapes]
    flat = torch.cat([_bytes(tensor) for tensor in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)
    broadcast(flat, axis, TAG).wait()
    if first:
        return batches
    at, parts = 0, iter(tensors)
    found: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, TensorShape):
            found.append(leaf)
            continue
        tensor = next(parts)
        size = tensor.numel() * tensor.element_size()
        _bytes(tensor).copy_(flat[at : at + size])
        at += size
        found.append(tensor)
    return tree_unflatten(found, spec)


def _shape_of_tensor(leaf: Any) -> Any:
    return TensorShape.of(leaf) if isinstance(leaf, Tensor) else leaf


def _share_nest(value: Any, axis: Axis, device: torch.device) -> Any:
    content = packed(value).to(device) if axis.rank == 0 else None
    size = torch.tensor([0 if content is None else content.numel()], device=device)
    broadcast(size, axis, TAG).wait()
    if content is None:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    broadcast(content, axis, TAG).wait()
    return value if axis.rank == 0 else unpacked(content)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
