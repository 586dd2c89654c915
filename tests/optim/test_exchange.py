"""Full matrices are gathered on one rank each and scattered in slices.

The work is distributed, the bytes are counted.
"""

from __future__ import annotations

import pytest
import torch

from launcher.comm import CollectiveRecord, record_collectives
from launcher.optim.exchange import deal, on_whole
from launcher.optim.whole import held
from launcher.zero.flat import ParamSlot
from tests.engine.driving import STAGES, advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

MUON = {"type": "Muon", "params": {"lr": 0.02}}
Exchanged = tuple[list[bool], list[int], list[CollectiveRecord]]


def matrices(engine: object) -> list[ParamSlot]:
    return [slot for slot in engine.zero.slots.values() if len(slot.shape) == 2]  # type: ignore[attr-defined]


def number_them(ctx: RankContext, stage: int) -> Exchanged:
    """Set every element of matrix i to its own number; the work adds i.

    Return whether it is right, the work, and the bytes sent.
    """
    engine = engine_of(config_of(stage, optimizer=MUON))
    slots, worked = matrices(engine), []
    numbers = [torch.arange(slot.numel, dtype=torch.float32) for slot in slots]

    def work(i: int, matrix: torch.Tensor) -> torch.Tensor:
        assert matrix.shape == slots[i].shape and torch.equal(matrix.reshape(-1), numbers[i])
        worked.append(i)
        return matrix + i

    spans = [held(slot, ctx.rank) for slot in slots]
    mine = [None if span.start == span.stop else numbers[i][span] for i, span in enumerate(spans)]
    with record_collectives() as records:
        back = on_whole(slots, mine, work, "optimizer/muon")
    same = [
        got is None if own is None else got is not None and torch.equal(got, own + i)
        for i, (own, got) in enumerate(zip(mine, back, strict=True))
    ]
    return same, worked, records


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_matrices_travel_whole(pool: WorkerPool, stage: int, world: int) -> None:
    results = pool.run(number_them, world, stage)
    count = sum(p.dim() == 2 for p in stack().parameters())
    assert all(all(same) for same, _, _ in results)
    assert sorted(i for _, worked, _ in results for i in worked) == list(range(count))  # each once


@pytest.mark.parametrize("stage", STAGES)
def test_bytes(pool: WorkerPool, stage: int) -> None:
    """Together the ranks send every matrix at most twice: the missing slices to its rank, and the results back.

    If nothing is sharded, nothing is gathered, and the results are sent to all.
    """
    world, whole = 4, 4 * sum(p.numel() for p in stack().parameters() if p.dim() == 2)
    results = pool.run(number_them, world, stage)
    sent = {"assemble": 0, "return": 0}
    for _, _, records in results:
        assert [(r.op, r.tag) for r in records] == [
            ("all_to_all", "optimizer/muon/assemble"),
            ("all_to_all", "optimizer/muon/return"),
        ]
        for record in records:
            sent[record.tag.rpartition("/")[2]] += record.sent
    if stage == 0:
        assert sent == {"assemble": 0, "return": (world - 1) * whole}
    else:
        assert sent["assemble"] == sent["return"] <= whole
        assert sent["assemble"] >= whole // 4  # small matrices may lie on their rank already


def collectives_of_a_step(ctx: RankContext, stage: int, kind: str) -> list[str]:
    engine = engine_of(config_of(stage, optimizer={"type": kind, "params": {"lr": 0.01}}))
    advance(engine, ctx, [0])
    with record_collectives() as records:
        advance(engine, ctx, [1])
    return [f"{r.op} {r.tag}" for r in records if r.tag.startswith("optimizer/")]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_has_one_batch_of_them(pool: WorkerPool, stage: int) -> None:
    muon = ["all_to_all optimizer/muon/assemble", "all_to_all optimizer/muon/return"]
    lamb = ["all_reduce optimizer/lamb"] if stage else []  # every rank has whole parameters at stage 0
    assert pool.run(collectives_of_a_step, 2, stage, "Muon") == [muon] * 2
    assert pool.run(collectives_of_a_step, 2, stage, "Lamb") == [lamb] * 2
    assert pool.run(collectives_of_a_step, 2, stage, "Lion") == [[]] * 2


def shares(ctx: RankContext) -> list[int]:
    return deal(matrices(engine_of(config_of(3, optimizer=MUON))), ctx.world)


def test_work_is_dealt_evenly(pool: WorkerPool) -> None:
    owners = pool.run(shares, 2)
    assert owners[0] == owners[1]
    shapes = [p.shape for p in stack().parameters() if p.dim() == 2]
    work = [0, 0]
    for owner, shape in zip(owners[0], shapes, strict=True):
        work[owner] += shape.numel() * min(shape)
    assert max(work) < 0.6 * sum(work)
