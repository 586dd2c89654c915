"""The microbatches of a step: made when they are asked for; and from the first stage to all, for only its ranks read
data."""

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
    """Makes its items in order, each once. So a step reads the data of a microbatch when its forward comes, and
    random numbers are drawn in the order of a plain loop.

    Args:
        length: How many items there are.
        make: Makes the item of an index; called with 0, 1, 2, ...
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
        """All items, made before the first is given: the loop of `Sequence` takes an IndexError of `make` for the end,
        and turns its StopIteration into a RuntimeError."""
        if self._length:
            self[self._length - 1]
        return iter(self._made)


def share(batches: Any, axis: Axis, device: torch.device) -> Any:
    """The microbatches of stage 0 on every stage: one broadcast of what they look like, one of all their bytes.

    Args:
        batches: any nest of tensors and plain data, on `device`; only rank 0's of the axis is read, but
            in a rehearsal, where there is nobody else.
        axis: pp; every rank must call it.
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
