"""Process groups for lines of ranks in the mesh, for device and host tensors, connected on creation.

NCCL connects the ranks of a group at its first collective, and blocks the host until all of them arrive. If
two ranks first used two groups in different orders, they would deadlock, so a group is connected when it is
created. Groups have the timeout of the default process group.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from launcher.comm.setup import BACKENDS


def line_of(lines: list[list[int]], device: torch.device) -> dist.ProcessGroup | None:
    """Return a new group of this rank's line; None if it is on no line. Every rank must call this.

    Args:
        lines: global ranks; no rank is on two lines.
        device: of this rank.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    made: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(
        lines, timeout=timeout_of(world), backend=BACKENDS[device.type]
    )[0]
    return made if made is None else connected(made, device)


def all_ranks(device: torch.device) -> dist.ProcessGroup:
    """Return the group of all ranks: the default one, or a second one if a script has initialized the default
    differently. Every rank must call this."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    backends = dist.get_backend_config(world)
    ours = "cpu:" in backends
    if device.type == "cuda":  # must be NCCL's, and connected when it was created
        ours = ours and "cuda:nccl" in backends and world.bound_device_id is not None
    return world if ours else _as_ours(world, device)


@lru_cache(maxsize=1)
def _as_ours(world: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a second group of all ranks, shared by all engines."""
    line = line_of([list(range(world.size()))], device)
    assert line is not None
    return line


def connected(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Connect the ranks of a group, unless they are connected already. All of its ranks must call this."""
    if device.type == "cuda":
        backend = group._get_backend(device)
        if isinstance(backend, dist.ProcessGroupNCCL) and not backend._is_initialized():
            backend.eager_connect_single_device(device)
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the ranks of a group wait for each other."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def or_alone(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group of an axis, or a group of this rank alone if the axis has none: to torch, None
    means all ranks. Return None if there is only one rank."""
    if group is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return group
    return _alone(dist.group.WORLD)


@lru_cache(maxsize=1)
def _alone(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank only.

    Args:
        world: all ranks. Part of the cache key: once they are initialized anew, the old group is invalid.
    """
    # NCCL would create it by splitting the group of all ranks, and all of them would have to take part.
    backend = None if world.bound_device_id is None else "gloo"
    made: dist.ProcessGroup = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, backend=backend
    )
    return made
