"""Process groups of mesh axes: their ranks and timeouts; creating one does not involve all ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.comm import Mesh
from launcher.comm.groups import line_of, or_alone, timeout_of
from tests.pool import RankContext, WorkerPool

CPU = torch.device("cpu")


def on_a_line(ctx: RankContext, lines: list[list[int]]) -> list[int]:
    group = line_of(lines, CPU)
    return [] if group is None else dist.get_process_group_ranks(group)


def test_a_rank_gets_the_line_it_is_on(pool: WorkerPool) -> None:
    assert pool.run(on_a_line, 4, [[0, 2], [1, 3]]) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert pool.run(on_a_line, 4, [[0, 1]]) == [[0, 1], [0, 1], [], []]


def waits(ctx: RankContext) -> list[timedelta]:
    world = dist.group.WORLD
    assert world is not None
    world._get_backend(CPU).options._timeout = timedelta(seconds=77)
    mesh = Mesh.build(CPU, tp=2)
    return [timeout_of(axis.group) for axis in mesh.axes.values() if axis.group is not None]


def test_its_ranks_wait_as_long_as_all_ranks_do(pool: WorkerPool) -> None:
    assert pool.run(waits, 4)[0] == [timedelta(seconds=77)] * 2


def alone(ctx: RankContext) -> list[int] | None:
    group = or_alone(None) if ctx.rank == 1 else None  # the others do not come
    return group and dist.get_process_group_ranks(group)


def test_a_rank_makes_its_own_group_alone(pool: WorkerPool) -> None:
    assert pool.run(alone, 2) == [None, [1]]
