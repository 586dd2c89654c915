"""Process groups of lines of the mesh: for tensors of the device and of the host, with all ranks' timeout, connected.

NCCL connects the ranks of a group at its first collective, and the host waits there for all of them. Where two groups
are first used in another order here than there, nobody would go on: so a group is connected when it is made.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist

from launcher.comm.setup import BACKENDS


def line_of(lines: list[list[int]], device: torch.device) -> dist.ProcessGroup | None:
    """Return a new group of this rank's line; None where it is on no line. Every rank must call it.

    Args:
        lines: global ranks, of which none is on two lines.
        device: of this rank.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed has been started"
    made: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(
        lines, timeout=timeout_of(world), backend=BACKENDS[device.type]
    )[0]
    return made if made is None else connected(made, device)


def all_ranks(device: torch.device) -> dist.ProcessGroup:
    """Return the group of all ranks; one more where scripts have started it in another way. All ranks must call it."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed has been started"
    backends = dist.get_backend_config(world)
    ours = "cpu:" in backends
    if device.type == "cuda":  # NCCL's, and connected when it was made
        ours = ours and "cuda:nccl" in backends and world.bound_device_id is not None
    return world if ours else _as_ours(world, device)


@lru_cache(maxsize=1)
def _as_ours(world: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return one more group of all ranks, for all engines."""
    line = line_of([list(range(world.size()))], device)
    assert line is not None
    return line


def connected(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Connect the ranks of a group, if they are not; all of them must call it."""
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
    """Return the process group of an axis; that of this rank alone where the axis has none, for to torch None means all
    ranks. None where there is one rank."""
    if group is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return group
    return _alone(dist.group.WORLD)


@lru_cache(maxsize=1)
def _alone(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank only.

    Args:
        world: all ranks; after they were set up anew the old group is of no use.
    """
    # NCCL would make it by splitting the group of all ranks, which all of them would have to do together.
    backend = None if world.bound_device_id is None else "gloo"
    made: dist.ProcessGroup = dist.new_group(
        [dist.get_rank()], use_local_synchronization=True, backend=backend
    )
    return made
