"""The torch.distributed calls of GPU ranks (`nccl.py`), run on CPUs: gloo replaces NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm import Pending, all_gather, all_reduce, broadcast, reduce_scatter
from launcher.comm.mesh import Axis
from launcher.comm.nccl import NcclTransport
from launcher.comm.p2p import P2PChannel
from launcher.comm.transport import Transports
from tests.pool import RankContext, WorkerPool

SIZE = 6
PARTS = [slice(None)], [slice(0, 2), slice(2, 6)]
WORLDS = pytest.mark.parametrize("world", [2, 3])


def axis() -> Axis:
    group = dist.group.WORLD
    assert group is not None
    transports = Transports.alike(NcclTransport(group, dist.new_group()))
    return Axis("dp", group.size(), group.rank(), group, transports)


def own(rank: int, numel: int) -> Tensor:
    """Return integers, so that a sum is the same in every order."""
    return torch.arange(numel, dtype=torch.float32) * (rank + 1) % 13


def done(starts: list[Callable[[], Pending]]) -> None:
    for pending in [start() for start in starts]:
        pending.wait()


def gather(ctx: RankContext, parts: list[slice]) -> Tensor:
    dp, full = axis(), torch.full((ctx.world * SIZE,), float("nan"))
    full[dp.span(full.numel())] = own(ctx.rank, SIZE)
    done([lambda part=part: all_gather(full, dp, "unit/forward", within=part) for part in parts])
    return full


@WORLDS
@pytest.mark.parametrize("parts", PARTS, ids=["whole", "parts"])
def test_all_gather(pool: WorkerPool, world: int, parts: list[slice]) -> None:
    want = torch.cat([own(rank, SIZE) for rank in range(world)])
    assert all(torch.equal(got, want) for got in pool.run(gather, world, parts))


def scatter(ctx: RankContext, parts: list[slice], wire: torch.dtype, accumulate: bool) -> Tensor:
    dp, full, out = axis(), own(ctx.rank, ctx.world * SIZE).to(wire), torch.ones(SIZE)
    done([
        lambda part=part: reduce_scatter(full, out, dp, "unit/backward", within=part, accumulate=accumulate)
        for part in parts
    ])  # fmt: skip
    return out


@WORLDS
@pytest.mark.parametrize("parts", PARTS, ids=["whole", "parts"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_reduce_scatter(
    pool: WorkerPool, world: int, parts: list[slice], wire: torch.dtype, accumulate: bool
) -> None:
    want = sum(own(rank, world * SIZE) for rank in range(world)) + float(accumulate)
    for rank, got in enumerate(pool.run(scatter, world, parts, wire, accumulate)):
        assert torch.equal(got, want[rank * SIZE : (rank + 1) * SIZE])


def reduced_and_sent(ctx: RankContext) -> tuple[Tensor, ...]:
    dp, after, before = axis(), (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world
    summed, told = own(ctx.rank, SIZE), own(ctx.rank, SIZE)
    forward, back = torch.empty(SIZE), torch.empty(SIZE)
    channel = P2PChannel(dp)
    done([
        lambda: all_reduce(summed, dp, "root/norm"),
        lambda: broadcast(told, dp, "root/init", source=1),
        lambda: channel.receive(forward, before, "s/recv_f"),
        lambda: channel.send(own(ctx.rank, SIZE), after, "s/send_f"),
        lambda: channel.receive(back, after, "s/recv_b", back=True),
        lambda: channel.send(own(ctx.rank, SIZE) + 50, before, "s/send_b", back=True),
    ])  # fmt: skip
    return summed, told, forward, back


@WORLDS
def test_the_others(pool: WorkerPool, world: int) -> None:
    total = sum(own(rank, SIZE) for rank in range(world))
    for rank, (summed, told, forward, back) in enumerate(pool.run(reduced_and_sent, world)):
        assert torch.equal(summed, total) and torch.equal(told, own(1, SIZE))
        assert torch.equal(forward, own((rank - 1) % world, SIZE))
        assert torch.equal(back, own((rank + 1) % world, SIZE) + 50)
