"""Every collective matches its definition: in parts, in place, in a wider dtype, over every transport."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

from launcher.comm import (
    Mesh,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    record_collectives,
    reduce_scatter,
)
from launcher.comm.choose import TRANSPORT
from launcher.comm.mesh import Axis
from launcher.comm.shared_memory.transport import BLOCK
from tests.pool import RankContext, WorkerPool

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])
PARTS = pytest.mark.parametrize("cuts", [1, 2], ids=["whole", "parts"])
MIDDLE = 1 << 15
# (elements of a slice, transport): shown on boards; shown by few ranks; read block by block; always sent
WAYS = pytest.mark.parametrize(
    ("size", "way"), [(96, ""), (MIDDLE, ""), (BLOCK + 5000, ""), (MIDDLE, "sockets")]
)


def axis_of(way: str) -> Axis:
    os.environ[TRANSPORT] = way
    try:
        return Mesh.build(torch.device("cpu")).dp
    finally:
        del os.environ[TRANSPORT]


def parts_of(size: int, cuts: int) -> list[slice]:
    return [slice(None)] if cuts == 1 else [slice(0, size // 3), slice(size // 3, size)]


def values(rank: int, numel: int) -> Tensor:
    """Return arbitrary numbers that differ by rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def gather(ctx: RankContext, size: int, way: str, cuts: int) -> Tensor:
    axis = axis_of(way)
    full = torch.full((ctx.world * size,), float("nan"))
    full[axis.span(full.numel())] = values(ctx.rank, size)
    for pending in [all_gather(full, axis, "unit/forward", within=part) for part in parts_of(size, cuts)]:
        pending.wait()
    return full


@pytest.mark.pairwise
@WORLDS
@WAYS
@PARTS
def test_all_gather(pool: WorkerPool, world: int, size: int, way: str, cuts: int) -> None:
    want = torch.cat([values(rank, size) for rank in range(world)])
    for got in pool.run(gather, world, size, way, cuts):
        assert torch.equal(got, want)


def scatter(
    ctx: RankContext, size: int, way: str, cuts: int, in_place: bool, accumulate: bool, wire: torch.dtype
) -> tuple[Tensor, bool]:
    axis = axis_of(way)
    full = values(ctx.rank, ctx.world * size).to(wire)
    before, mine = full.clone(), axis.span(full.numel())
    out = full[mine] if in_place else torch.ones(size)
    parts = parts_of(size, cuts)
    works = [reduce_scatter(full, out, axis, "unit/backward", within=p, accumulate=accumulate) for p in parts]
    for pending in works:
        pending.wait()
    result = out.clone()
    full[mine] = before[mine]
    return result, torch.equal(full, before)


@pytest.mark.pairwise
@WORLDS
@WAYS
@PARTS
@pytest.mark.parametrize(("in_place", "accumulate", "wire"), [
    (False, False, torch.float32),
    (True, False, torch.float32),
    (False, True, torch.float32),
    (False, False, torch.bfloat16),
    (False, True, torch.bfloat16),
], ids=["out", "in place", "accumulate", "bf16 wire", "bf16 wire, accumulate"])  # fmt: skip
def test_reduce_scatter(
    pool: WorkerPool,
    world: int,
    size: int,
    way: str,
    cuts: int,
    in_place: bool,
    accumulate: bool,
    wire: torch.dtype,
) -> None:
    """The sum is taken in rank order, in the dtype of the result, so it is bit-identical to the sum here."""
    want = torch.ones(world * size) if accumulate else torch.zeros(world * size)
    for rank in range(world):
        want = want + values(rank, world * size).to(wire).float()
    results = pool.run(scatter, world, size, way, cuts, in_place, accumulate, wire)
    for rank, (got, others_kept) in enumerate(results):
        assert torch.equal(got, want[rank * size : (rank + 1) * size])
        assert others_kept


def reduce_and_send(ctx: RankContext, size: int, way: str) -> tuple[Tensor, Tensor]:
    axis = axis_of(way)
    numel = ctx.world * size + 1  # ranks' slices differ in length
    summed, sent = values(ctx.rank, numel), values(ctx.rank, numel)
    works = [all_reduce(summed, axis, "root/norm"), broadcast(sent, axis, "root/init", source=ctx.world - 1)]
    for pending in works:
        pending.wait()
    return summed, sent


@WORLDS
@WAYS
def test_all_reduce_and_broadcast(pool: WorkerPool, world: int, size: int, way: str) -> None:
    want = sum(values(rank, world * size + 1) for rank in range(world))
    results = pool.run(reduce_and_send, world, size, way)
    for summed, sent in results:
        torch.testing.assert_close(summed, want)
        assert torch.equal(summed, results[0][0])
        assert torch.equal(sent, values(world - 1, world * size + 1))


def exchange(ctx: RankContext, size: int, way: str) -> tuple[list[Tensor], int]:
    """Run two exchanges in flight at once. Rank 1 sends nothing to rank 2, so no one waits for that."""
    axis = axis_of(way)
    outgoing = [_message(ctx.rank, rank, size) for rank in range(ctx.world)]
    incoming = [torch.full_like(_message(rank, ctx.rank, size), -1) for rank in range(ctx.world)]
    again = [torch.full_like(part, -1) for part in incoming]
    with record_collectives() as records:
        first = all_to_all(outgoing, incoming, axis, "a/exchange")
        second = all_to_all([-part for part in outgoing], again, axis, "b/exchange")
        first.wait()
        second.wait()
    for part in outgoing:
        part.fill_(math.nan)  # as soon as the wait is over, the sender may change what it sent
    assert all(torch.equal(part, -other) for rank, (part, other) in enumerate(zip(incoming, again, strict=True))
               if rank != ctx.rank)  # fmt: skip
    return incoming, sum(record.sent for record in records)


def _message(source: int, target: int, size: int) -> Tensor:
    """Return a message whose length differs for each pair."""
    numel = 0 if (source, target) == (1, 2) else size * (source + 2 * target) // 4
    return values(10 * source + target, numel)


@WORLDS
@WAYS
def test_all_to_all(pool: WorkerPool, world: int, size: int, way: str) -> None:
    for rank, (incoming, sent) in enumerate(pool.run(exchange, world, size, way)):
        for source, got in enumerate(incoming):
            want = _message(source, rank, size)
            assert torch.equal(got, want if source != rank else torch.full_like(got, -1))
        messages = [_message(rank, target, size).numel() for target in range(world) if target != rank]
        assert sent == 2 * 4 * sum(messages)


def crossed(ctx: RankContext, size: int, way: str) -> list[Tensor]:
    """Rank 0 gathers before it reduces, the others after: a parameter that is used on one rank only."""
    axis = axis_of(way)
    gathered = torch.zeros(ctx.world * size)
    gathered[axis.span(gathered.numel())] = values(ctx.rank, size)
    full, out = values(ctx.rank, ctx.world * size), torch.empty(size)
    starts = [
        lambda: all_gather(gathered, axis, "a/backward"),
        lambda: reduce_scatter(full, out, axis, "b/backward"),
    ]
    for pending in [start() for start in (starts if ctx.rank == 0 else reversed(starts))]:
        pending.wait()
    return [gathered, out]


@WAYS
@pytest.mark.parametrize("world", [2, 4])
def test_gathers_and_reductions_may_cross(pool: WorkerPool, world: int, size: int, way: str) -> None:
    total = torch.stack([values(rank, world * size) for rank in range(world)]).sum(0)
    for rank, (gathered, out) in enumerate(pool.run(crossed, world, size, way)):
        assert torch.equal(gathered, torch.cat([values(r, size) for r in range(world)]))
        torch.testing.assert_close(out, total[rank * size : (rank + 1) * size])


def many(ctx: RankContext, size: int) -> bool:
    """Modify and reuse buffers as soon as the result was waited for."""
    axis = axis_of("")
    full, good = torch.zeros(ctx.world * size), True
    for turn in range(30):
        full.fill_(ctx.rank + turn)
        all_reduce(full, axis, "root/a").wait()
        good &= bool((full == sum(range(ctx.world)) + ctx.world * turn).all())
        full[axis.span(full.numel())] = ctx.rank
        all_gather(full, axis, "root/b").wait()
        good &= bool((full.view(ctx.world, -1) == torch.arange(ctx.world).view(-1, 1)).all())
    return good


@pytest.mark.parametrize("world", [2, 4])
def test_a_buffer_may_be_changed_after_the_wait(pool: WorkerPool, world: int) -> None:
    assert all(pool.run(many, world, MIDDLE))


def transport(ctx: RankContext, way: str) -> str:
    return str(axis_of(way).transports)


def test_what_was_chosen_is_said(pool: WorkerPool) -> None:
    assert pool.run(transport, 2, "sockets") == ["sockets: set by LAUNCHER_CPU_TRANSPORT"] * 2
    (first, second) = pool.run(transport, 2, "")
    assert first == second and (first == "reading each other's memory" or first.startswith("sockets: "))


def recorded(ctx: RankContext) -> list[tuple[str, str, int, int]]:
    axis, size = axis_of(""), 96
    full, out = torch.zeros(ctx.world * size), torch.zeros(size)
    with record_collectives() as records:
        all_gather(full, axis, "a/forward").wait()
        reduce_scatter(full, out, axis, "a/backward").wait()
        all_reduce(full, axis, "root/norm").wait()
        broadcast(full, axis, "root/init").wait()
    return [(r.op, r.tag, r.numel, r.sent) for r in records]


def test_records(pool: WorkerPool) -> None:
    """The bytes sent are (N - 1) / N of the buffer, twice that for an all-reduce."""
    whole, once = 4 * 96, 3 * 96 * 4
    assert pool.run(recorded, 4) == 4 * [
        [
            ("all_gather", "a/forward", whole, once),
            ("reduce_scatter", "a/backward", whole, once),
            ("all_reduce", "root/norm", whole, 2 * once),
            ("broadcast", "root/init", whole, once),
        ]
    ]
    assert pool.run(recorded, 1) == [[]]
