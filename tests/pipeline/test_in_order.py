"""Pipelines over communicators that execute in order, like NCCL's, do not deadlock.

Without `open_ways` the cases below hang: a receive that was posted early blocks the send that it waits for.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.nccl import NcclTransport
from launcher.comm.transport import Transports, Way
from tests.pipeline.parity_table import TOLERANCE, Case, Found, compare
from tests.pool import RankContext, WorkerPool

LIMIT = timedelta(seconds=60)


class Communicator:
    """Sends and receives of a process group, executed one after another in the order in which they were started."""

    def __init__(self, group: Any) -> None:
        self._group, self._stream = group, ThreadPoolExecutor(1)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return Work(self._stream.submit(lambda: self._group.send(tensors, to, tag).wait()))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return Work(self._stream.submit(lambda: self._group.recv(tensors, source, tag).wait()))


class Work:
    def __init__(self, done: Future[Any]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()


class InOrder(NcclTransport):
    """The same between CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group, group)

    def _between_two(self, store: dist.Store, rank: int) -> Any:
        return Communicator(dist.ProcessGroupGloo(store, rank, 2, LIMIT))  # type: ignore[call-arg]


def compared(ctx: RankContext, case: Case) -> tuple[Found, list[Way]]:
    def choose(device: torch.device, group: dist.ProcessGroup, reductions: Any = None) -> Transports:
        return Transports.alike(InOrder(group))

    opened: list[Way] = []

    def closed(transport: InOrder) -> None:
        opened.extend(sorted(transport._ways))
        transport._ways.clear()

    with patch("launcher.comm.mesh.choose", choose), patch.object(InOrder, "close_ways", closed):
        found = compare(ctx, case, 3)
    return found, opened


def both_ways(pairs: list[tuple[int, int]]) -> list[Way]:
    return sorted(
        [Way(*pair, back=False) for pair in pairs] + [Way(to, source, back=True) for source, to in pairs]
    )


LINE = [(0, 1), (1, 2), (2, 3)]
ROUTES = {
    "1f1b": LINE,
    "zb-h1": LINE,
    "interleaved": [*LINE, (3, 0)],
    "zbv": [*LINE, (3, 2), (2, 1), (1, 0)],
}


@pytest.mark.parametrize("schedule", ROUTES)
def test_four_stages(pool: WorkerPool, schedule: str) -> None:
    """Each rank opens its connections in an order common to all ranks, and no unused ones."""
    for rank, (found, opened) in enumerate(pool.run(compared, 4, Case(schedule, 8, 0, False))):
        assert found.largest <= TOLERANCE
        assert opened == [way for way in both_ways(ROUTES[schedule]) if rank in (way.source, way.to)]


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_two_stages_that_send_both_ways(pool: WorkerPool, schedule: str) -> None:
    for found, _ in pool.run(compared, 2, Case(schedule, 4, 0, True)):
        assert found.largest <= TOLERANCE
