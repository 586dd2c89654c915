"""The microbatches of a step, from the first stage to all: only its ranks read data."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from launcher.comm import Axis, broadcast
from launcher.pipeline.crossing import Shape

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
    leaves, spec = tree_flatten(batches) if axis.rank == 0 else ([], None)
    header = [Shape.of(leaf) if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    header, spec = _share_object((header, spec), axis, device)
    if axis.rank == 0:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    else:
        tensors = [
            torch.empty(entry.size, dtype=entry.dtype, device=device)
            for entry in header
            if isinstance(entry, Shape)
        ]
    flat = torch.cat([_bytes(tensor) for tensor in tensors]) if tensors else torch.empty(0, dtype=torch.uint8)
    broadcast(flat, axis, TAG).wait()
    if axis.rank == 0:
        return batches
    at, parts = 0, iter(tensors)
    found: list[Any] = []
    for entry in header:
        if not isinstance(entry, Shape):
            found.append(entry[0])
            continue
        tensor = next(parts)
        size = tensor.numel() * tensor.element_size()
        _bytes(tensor).copy_(flat[at : at + size])
        at += size
        found.append(tensor)
    return tree_unflatten(found, spec)


def packed(value: Any) -> Tensor:
    """[bytes] uint8 on the CPU; `unpacked` gives the value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.cpu().numpy().tobytes()), weights_only=False)


def _share_object(value: Any, axis: Axis, device: torch.device) -> Any:
    content = packed(value).to(device) if axis.rank == 0 else None
    size = torch.tensor([0 if content is None else content.numel()], device=device)
    broadcast(size, axis, TAG).wait()
    if content is None:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    broadcast(content, axis, TAG).wait()
    return value if axis.rank == 0 else unpacked(content)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
