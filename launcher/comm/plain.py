"""Exchange of plain values between ranks, as JSON, so that data from a peer cannot execute code.

The object collectives of torch.distributed unpickle what the other side sends. Tuples stay tuples, and keys
that are not strings keep their type: torch's learning rate schedulers count milestones by integers, and the
states of callers contain tuples. Plain JSON would return strings and lists, and a scheduler would never reach
its milestones again.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_object_coll_device

from launcher.errors import LauncherError

PAIRS, TUPLE = "__pairs__", "__tuple__"
MOST = 1 << 40  # bytes of a value; more are not a size


def encode(value: Any) -> Any:
    """Return `value` in a form that JSON can represent; everything else is left for json to reject."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not {PAIRS, TUPLE} & value.keys():
            return {key: encode(inner) for key, inner in value.items()}
        return {PAIRS: [[encode(key), encode(inner)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [encode(inner) for inner in value]}
    if isinstance(value, list):
        return [encode(inner) for inner in value]
    return value


def decode(value: Any) -> Any:
    """Return the value that was passed to `encode`; a subclass of dict or tuple becomes a plain one."""
    if isinstance(value, dict):
        if value.keys() == {PAIRS}:
            return {decode(key): decode(inner) for key, inner in value[PAIRS]}
        if value.keys() == {TUPLE}:
            return tuple(decode(inner) for inner in value[TUPLE])
        return {key: decode(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    return value


def gather_plain(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of the group, in rank order. Collective.

    Args:
        value: numbers, strings, None, and lists, tuples and dicts of them.
        group: None means all ranks.

    Raises:
        LauncherError: another rank runs something else, and its data are no sizes.
    """
    mine, world = packed(value), dist.get_world_size(group)
    device = _get_object_coll_device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device), group=group)
    longest = max(int(size) for size in sizes)
    if astray := [rank for rank, size in enumerate(sizes) if not 0 < int(size) < MOST]:
        raise LauncherError(
            f"rank {astray[0]} of the group was in another collective while this rank exchanged settings",
            where="a collective call, such as save_checkpoint()",
            fix="make the call on all ranks, not only on the main process",
        )
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    every = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(every, padded.to(device), group=group)
    return [unpacked(content[: int(size)]) for content, size in zip(every, sizes, strict=True)]


def broadcast_from_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the group's first rank; the others' values are ignored. Collective."""
    first, device = dist.get_rank(group) == 0, _get_object_coll_device(group)
    content = packed(value).to(device) if first else None
    size = torch.tensor([0 if content is None else len(content)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    if content is None:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return value if first else unpacked(content)


def packed(value: Any) -> Tensor:
    """Return the value as [bytes] uint8 on the CPU; `unpacked` restores it.

    Raises:
        TypeError: JSON cannot represent it.
    """
    return torch.frombuffer(bytearray(json.dumps(encode(value)).encode()), dtype=torch.uint8)


def unpacked(content: Tensor) -> Any:
    return decode(json.loads(content.cpu().numpy().tobytes()))
