"""Ranks of one machine read each other's memory: correct in any order of waiting, with any number in flight."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from launcher.comm import Mesh, Pending, all_gather, all_reduce, reduce_scatter
from launcher.comm.mesh import Axis
from launcher.comm.p2p import P2PChannel
from launcher.comm.shared_memory.arena import SLOT, SLOTS
from launcher.comm.shared_memory.queue import ShmQueue
from launcher.errors import LauncherError
from tests.pool import RankContext, WorkerPool

TURNS = 240


@pytest.fixture(autouse=True)
def readable(pool: WorkerPool) -> None:
    """Skip if a sandbox forbids processes to read each other."""
    transport = pool.run(transport_of, 2)[0]
    if transport != "reading each other's memory":
        pytest.skip(transport)


def transport_of(ctx: RankContext) -> str:
    return str(Mesh.build(torch.device("cpu")).dp.transports)


def own(rank: int, turn: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + turn))


def start(axis: Axis, turn: int, size: int) -> tuple[Pending, Callable[[], bool]]:
    """Start a collective, and return a check of its result."""
    world = axis.degree
    if turn % 3 == 0:
        full = torch.zeros(world * size)
        full[axis.span(full.numel())] = own(axis.rank, turn, size)
        want = torch.cat([own(rank, turn, size) for rank in range(world)])
        return all_gather(full, axis, "a/forward"), lambda: torch.equal(full, want)
    if turn % 3 == 1:
        out, fulls = torch.zeros(size), [own(rank, turn, world * size) for rank in range(world)]
        terms = [full[axis.span(world * size)] for full in fulls]
        pending = reduce_scatter(fulls[axis.rank], out, axis, "a/backward")
        return pending, lambda: torch.equal(out, sum(terms[1:], terms[0]))
    buffer = own(axis.rank, turn, size)
    terms = [own(rank, turn, size) for rank in range(world)]
    return all_reduce(buffer, axis, "a/norm"), lambda: torch.equal(buffer, sum(terms[1:], terms[0]))


def any_order(ctx: RankContext, most: int) -> bool:
    """Start the same collectives on all ranks, and wait in different orders with many in flight."""
    axis, sizes, waits = Mesh.build(torch.device("cpu")).dp, random.Random(0), random.Random(ctx.rank)
    under_way: list[tuple[Pending, Callable[[], bool]]] = []
    good = True
    for turn in range(TURNS):
        under_way.append(start(axis, turn, sizes.choice([1, 5, 1000, 40_000, SLOT // 4 + 3])))
        while len(under_way) > most or (most < SLOTS and under_way and waits.random() < 0.3):
            pending, is_right = under_way.pop(waits.randrange(len(under_way)))
            pending.wait()
            good &= is_right()
    for pending, is_right in under_way:
        pending.wait()
        good &= is_right()
    return good


@pytest.mark.pairwise
@pytest.mark.parametrize("most", [8, 2 * SLOTS])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_any_order_and_more_than_there_are_slots(pool: WorkerPool, world: int, most: int) -> None:
    """Results are bit-identical: every rank sums in rank order."""
    assert pool.run(any_order, world, most) == [True] * world


def correspondence(ctx: RankContext, size: int) -> bool:
    """Both ranks send more than the slots hold, then receive."""
    axis, peer = Mesh.build(torch.device("cpu")).dp, 1 - ctx.rank
    first, letters = P2PChannel(axis), P2PChannel(axis)
    early = first.send(
        own(ctx.rank, 999, size), peer, "s/whole"
    )  # another correspondence along the same axis
    count = 2 * SLOTS
    sent = [letters.send(own(ctx.rank, i, size), peer, "s/send_f", back=i % 2 == 1) for i in range(count)]
    came, into = torch.empty(size), [torch.empty(size) for _ in range(count)]
    first.receive(came, peer, "s/whole").wait()
    receives = [letters.receive(t, peer, "s/recv_f", back=i % 2 == 1) for i, t in enumerate(into)]
    for pending in [*receives, *sent, early]:
        pending.wait()
    return torch.equal(came, own(peer, 999, size)) and all(
        torch.equal(t, own(peer, i, size)) for i, t in enumerate(into)
    )


@pytest.mark.parametrize("size", [7, 50_000, pytest.param(SLOT, marks=pytest.mark.full)])
def test_letters(pool: WorkerPool, size: int) -> None:
    assert pool.run(correspondence, 2, size) == [True, True]


DYING = """
import sys, time
from launcher.comm.shared_memory.queue import ShmQueue, ShmQueueAddress
mine = ShmQueue(1, 2)
mine.connect([ShmQueueAddress(int(sys.argv[1]), int(sys.argv[2])), mine.address])
mine.send(0, 7, 70)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_peer_ends_the_wait_and_is_named() -> None:
    """This holds even before the peer is reaped; data that it had sent arrives."""
    mine = ShmQueue(0, 2)
    command = [sys.executable, "-c", DYING, str(os.getpid()), str(mine.address.descriptor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
        mine._peers = [mine.address, type(mine.address)(peer.pid, 0)]
        os.kill(peer.pid, signal.SIGKILL)
        began = time.monotonic()
        assert mine.receive(1, 7) == 70
        with pytest.raises(LauncherError, match=rf"rank 1 of the axis \(process {peer.pid}\) has ended"):
            mine.receive(1, 8)
        assert time.monotonic() - began < 10
