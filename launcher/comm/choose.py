"""Selection of the transport of an axis, made once, when the axis gets its process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from launcher.comm.transport import Transports

TRANSPORT = "LAUNCHER_CPU_TRANSPORT"  # "sockets": never read the memory of other ranks


def choose(
    device: torch.device, group: dist.ProcessGroup, reductions: dist.ProcessGroup | None = None
) -> Transports:
    """Return the transports between the ranks of `group`; their `str` describes the choice. Collective.

    Args:
        device: of this rank.
        reductions: on CUDA, a second group of the same ranks, for reductions.
    """
    if device.type == "cuda":
        return plain_transports(group, reductions)
    from launcher.comm.gloo import GlooTransport

    if os.environ.get(TRANSPORT) == "sockets":
        return Transports.alike(GlooTransport(group, f"set by {TRANSPORT}"))
    from launcher.comm.shared_memory.connect import PeerMemoryUnavailable, connect
    from launcher.comm.shared_memory.transport import SharedMemoryTransport

    try:
        return Transports.alike(SharedMemoryTransport(group, connect(group)))
    except PeerMemoryUnavailable as why:
        return Transports.alike(GlooTransport(group, str(why)))


def plain_transports(group: dist.ProcessGroup, reductions: dist.ProcessGroup | None = None) -> Transports:
    """Return the transports of any process group, without probing: NCCL for devices, sockets for CPUs."""
    from launcher.comm.gloo import GlooTransport
    from launcher.comm.nccl import NcclTransport

    return Transports(NcclTransport(group, reductions or group), GlooTransport(group))
