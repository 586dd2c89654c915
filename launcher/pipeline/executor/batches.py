"""The microbatches of a step, from the first stage to all: only its ranks read data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from launcher.comm import Axis, broadcast
from launcher.pipeline.crossing import TensorShape
from launcher.pipeline.plain import packed, unpacked

TAG = "pipeline/batch"


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
