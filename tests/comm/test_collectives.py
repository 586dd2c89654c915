"""Every collective gives what its definition says, in parts, in place, and in a wider dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from launcher.comm import Mesh, all_gather, all_reduce, broadcast, record_collectives, reduce_scatter
from tests.pool import RankContext, WorkerPool

S = 96  # elements of a slice
WORLDS = [1, 2, 3, 4]


def values(rank: int, numel: int) -> Tensor:
    """Any numbers, other ones on every rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def gather(ctx: RankContext, parts: list[slice]) -> Tensor:
    axis = Mesh.build(torch.device("cpu")).dp
    full = torch.full((ctx.world * S,), float("nan"))
    full[axis.span(full.numel())] = values(ctx.rank, S)
    for pending in [all_gather(full, axis, "unit/forward", within=part) for part in parts]:
        pending.wait()
    return full


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("parts", [[slice(None)], [slice(0, 32), slice(32, 96)]], ids=["whole", "parts"])
def test_all_gather(pool: WorkerPool, world: int, parts: list[slice]) -> None:
    want = torch.cat([values(rank, S) for rank in range(world)])
    for got in pool.run(gather, world, parts):
        assert torch.equal(got, want)


def scatter(
    ctx: RankContext, parts: list[slice], in_place: bool, accumulate: bool, wire: torch.dtype
) -> tuple[Tensor, Tensor]:
    axis = Mesh.build(torch.device("cpu")).dp
    full = values(ctx.rank, ctx.world * S).to(wire)
    before = full.clone()
    out = full[axis.span(full.numel())] if in_place else torch.ones(S)
    works = [reduce_scatter(full, out, axis, "unit/backward", within=p, accumulate=accumulate) for p in parts]
    for pending in works:
        pending.wait()
    mine = axis.span(full.numel())
    untouched = torch.cat(
        [full[: mine.start] - before[: mine.start], full[mine.stop :] - before[mine.stop :]]
    )
    return out.clone(), untouched


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("parts", [[slice(None)], [slice(0, 32), slice(32, 96)]], ids=["whole", "parts"])
@pytest.mark.parametrize(
    ("in_place", "accumulate", "wire"),
    [
        (False, False, torch.float32),
        (True, False, torch.float32),
        (False, True, torch.float32),
        (False, False, torch.bfloat16),
        (False, True, torch.bfloat16),
    ],
    ids=["out", "in place", "accumulate", "bf16 wire", "bf16 wire, accumulate"],
)
def test_reduce_scatter(
    pool: WorkerPool, world: int, parts: list[slice], in_place: bool, accumulate: bool, wire: torch.dtype
) -> None:
    """The sum is taken in rank order, in the dtype of the result: the very same bits as here."""
    terms = [values(rank, world * S).to(wire).float() for rank in range(world)]
    want = torch.ones(world * S) if accumulate else torch.zeros(world * S)
    for term in terms:
        want = want + term
    for rank, (got, untouched) in enumerate(pool.run(scatter, world, parts, in_place, accumulate, wire)):
        assert torch.equal(got, want[rank * S : (rank + 1) * S])
        assert not untouched.any()


def reduce_and_send(ctx: RankContext) -> tuple[Tensor, Tensor]:
    axis = Mesh.build(torch.device("cpu")).dp
    summed, sent = values(ctx.rank, S), values(ctx.rank, S)
    all_reduce(summed, axis, "root/norm").wait()
    broadcast(sent, axis, "root/init", source=ctx.world - 1).wait()
    return summed, sent


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_and_broadcast(pool: WorkerPool, world: int) -> None:
    for summed, sent in pool.run(reduce_and_send, world):
        torch.testing.assert_close(summed, sum(values(rank, S) for rank in range(world)))
        assert torch.equal(sent, values(world - 1, S))


def crossed(ctx: RankContext) -> list[Tensor]:
    """Rank 0 gathers before it reduces, the others after: a parameter that is used on one rank only."""
    axis = Mesh.build(torch.device("cpu")).dp
    gathered = torch.zeros(ctx.world * S)
    gathered[axis.span(gathered.numel())] = values(ctx.rank, S)
    full, out = values(ctx.rank, ctx.world * S), torch.empty(S)
    starts = [
        lambda: all_gather(gathered, axis, "a/backward"),
        lambda: reduce_scatter(full, out, axis, "b/backward"),
    ]
    for pending in [start() for start in (starts if ctx.rank == 0 else reversed(starts))]:
        pending.wait()
    return [gathered, out]


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_and_reductions_may_cross(pool: WorkerPool, world: int) -> None:
    total = sum(values(rank, world * S) for rank in range(world))
    for rank, (gathered, out) in enumerate(pool.run(crossed, world)):
        assert torch.equal(gathered, torch.cat([values(r, S) for r in range(world)]))
        torch.testing.assert_close(out, total[rank * S : (rank + 1) * S])  # type: ignore[index]


def recorded(ctx: RankContext) -> list[tuple[str, str, int, int]]:
    axis = Mesh.build(torch.device("cpu")).dp
    full, out = torch.zeros(ctx.world * S), torch.zeros(S)
    with record_collectives() as records:
        all_gather(full, axis, "a/forward").wait()
        reduce_scatter(full, out, axis, "a/backward").wait()
        all_reduce(full, axis, "root/norm").wait()
        broadcast(full, axis, "root/init").wait()
    return [(r.op, r.tag, r.numel, r.sent) for r in records]


def test_records(pool: WorkerPool) -> None:
    """Bytes sent are (N - 1) / N of the buffer, twice that for an all-reduce."""
    once = 3 * S * 4
    assert pool.run(recorded, 4) == 4 * [
        [
            ("all_gather", "a/forward", 4 * S, once),
            ("reduce_scatter", "a/backward", 4 * S, once),
            ("all_reduce", "root/norm", 4 * S, 2 * once),
            ("broadcast", "root/init", 4 * S, once),
        ]
    ]
    assert pool.run(recorded, 1) == [[]]
