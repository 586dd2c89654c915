"""Connects the ranks of a group through shared memory, once, if they can read each other's memory."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from launcher.comm.plain import gather_plain
from launcher.comm.shared_memory import arena, cross_memory
from launcher.comm.shared_memory.queue import ShmQueue, ShmQueueAddress


class PeerMemoryUnavailable(Exception):
    """The memory of other ranks cannot be read; the message contains the reason."""


def connect(group: dist.ProcessGroup) -> ShmQueue:
    """Return a queue connected to those of the other ranks, if all can read each other's memory. Collective.

    Raises:
        PeerMemoryUnavailable: some rank cannot; raised on all ranks.
    """
    if sys.platform != "linux":
        raise PeerMemoryUnavailable("only Linux lets a process read another's memory")
    cross_memory.allow_siblings()
    probe, mailbox = torch.tensor([os.getpid()]), _mailbox(group)
    address = mailbox and (mailbox.address.pid, mailbox.address.descriptor)
    told = gather_plain((cross_memory.machine(), probe.data_ptr(), address), group)
    every = [(machine, place, box and ShmQueueAddress(*box)) for machine, place, box in told]
    # the probe and the mailbox must live until all ranks have read them
    problems = gather_plain(_connected(mailbox, every), group)
    found = [text for text in problems if text]
    if found or mailbox is None:
        raise PeerMemoryUnavailable(found[0])
    mailbox.all_are_connected()
    return mailbox


def _mailbox(group: dist.ProcessGroup) -> ShmQueue | None:
    try:
        return ShmQueue(group.rank(), group.size(), arena.BYTES)
    except OSError:
        return None


def _connected(mailbox: ShmQueue | None, every: list[tuple[str, int, Any]]) -> str | None:
    """Connect the mailbox. Return why that, or reading the memory of others, is impossible, else None."""
    if mailbox is None or any(address is None for _, _, address in every):
        return "a rank could not allocate shared memory"
    problem = cross_memory.problem([(machine, address.pid, probe) for machine, probe, address in every])
    if problem is not None:
        return problem
    try:
        mailbox.connect([address for _, _, address in every])
    except OSError as error:
        return f"the queue of another rank cannot be mapped: {error}"
    return None
