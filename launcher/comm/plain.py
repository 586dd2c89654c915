"""Plain values between ranks: they travel as JSON, so what a peer sends cannot run code here.

torch.distributed's collectives of objects unpickle what the other side sends.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_object_coll_device

from launcher.comm.values import decode, encode


def gather_plain(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every rank of the group passes, by rank. Collective.

    Args:
        value: numbers, texts, None, and lists, tuples and dicts of them.
        group: None is all ranks.
    """
    mine, world = packed(value), dist.get_world_size(group)
    device = _get_object_coll_device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    every = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(every, padded.to(device), group=group)
    return [unpacked(content[: int(size)]) for content, size in zip(every, sizes, strict=True)]


def broadcast_from_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return what the first rank of the group passes; the others' values are not read. Collective."""
    first, device = dist.get_rank(group) == 0, _get_object_coll_device(group)
    content = packed(value).to(device) if first else None
    size = torch.tensor([0 if content is None else len(content)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    if content is None:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return value if first else unpacked(content)


def packed(value: Any) -> Tensor:
    """Return the value as [bytes] uint8 on the CPU; `unpacked` gives the value back.

    Raises:
        TypeError: JSON cannot hold it.
    """
    return torch.frombuffer(bytearray(json.dumps(encode(value)).encode()), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    return decode(json.loads(content.cpu().numpy().tobytes()))
