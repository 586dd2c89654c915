"""Model-parallel ranks that get different batches are reported, with the sampler to use."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from launcher.comm import record_collectives
from launcher.engine.same_inputs import FIRST, TAG, digest
from launcher.errors import LauncherError
from tests.pipeline.running import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, tiny_llama

TP = {"tensor_parallel": {"autotp_size": 2}}


def engine(**sections: Any) -> Any:
    pipeline = sections.pop("pipeline", {"stages": 1})
    return engine_of(config_of(sections.pop("stage", 1), 1, pipeline, **TP, **sections), tiny_llama(layers=4))


def trained(e: Any, ids: Tensor) -> None:
    """Train one step on some rows."""
    if e.runtime.staged.is_whole:
        e.backward(e(input_ids=ids, labels=ids).loss)
        e.step()
    else:
        e.train_batch(iter([{"input_ids": ids, "labels": ids}]))


def said(do: Any) -> str:
    try:
        do()
    except LauncherError as error:
        return str(error)
    return ""


def sampled(ctx: RankContext, over: str, sections: dict[str, Any]) -> str:
    """Return a script's own loader: with the usual sampler of data-parallel scripts, or the correct one."""
    e, rows = engine(**sections), batch(0, 16)
    dp = e.mesh.dp
    place = {"num_replicas": dp.degree, "rank": dp.rank} if over == "dp" else {}
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, **place))  # type: ignore[arg-type]
    found = said(lambda: trained(e, next(iter(loader))))
    e.destroy()
    return found


TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {}),
    "stage 3": (2, {"stage": 3}),
    "dp and tp": (4, {}),
    "stages": (4, {"pipeline": {"stages": 2}}),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_sampler_over_all_ranks_is_told_before_a_layer_sees_its_batches(
    pool: WorkerPool, topology: str
) -> None:
    world, sections = TOPOLOGIES[topology]
    for rank, found in enumerate(pool.run(sampled, world, "all", sections)):
        group = f"ranks {rank - rank % 2},{rank - rank % 2 + 1}"
        assert group in found and "received different inputs" in found, found
        assert "number 1" in found
        assert "num_replicas=engine.mesh.dp.degree, rank=engine.mesh.dp.rank" in found
    assert pool.run(sampled, world, "dp", sections) == [""] * world


def other_shapes(ctx: RankContext) -> str:
    e = engine()
    found = said(lambda: trained(e, batch(0, 4)[:, : 8 + 4 * ctx.rank]))
    e.destroy()
    return found


def test_different_shapes_do_not_hang(pool: WorkerPool) -> None:
    began = time.monotonic()
    assert all("received different inputs" in found for found in pool.run(other_shapes, 2))
    assert time.monotonic() - began < 60


def later(ctx: RankContext, sections: dict[str, Any], bad: int) -> tuple[int, str, bool]:
    """Return (steps that succeeded, the message of the next one, whether it changed weights)."""
    e = engine(**sections)
    for step in range(20):
        ids = batch(step, 4).clone()
        if step == bad and ctx.rank == ctx.world - 1:
            ids[0, 3] = (ids[0, 3] + 1) % 60  # one token of one rank
        before = [p.detach().clone() for p in e.module.parameters()]
        found = said(lambda ids=ids: trained(e, ids))
        if found:
            after = list(e.module.parameters())
            return step, found, not all(a.equal(b) for a, b in zip(before, after, strict=True))
    return 20, "", False


@pytest.mark.parametrize("topology", ["tp", "dp and tp", "stages"])
def test_one_token_in_a_later_step_is_told_before_weights_change(pool: WorkerPool, topology: str) -> None:
    world, sections = TOPOLOGIES[topology]
    if topology == "stages":  # the last rank reads nothing there
        assert pool.run(later, world, sections, 9) == [(20, "", False)] * world
        return
    found = pool.run(later, world, sections, 9)
    assert [(steps, changed) for steps, _, changed in found] == [(9, False)] * world
    assert all("step 10" in text and "received different inputs" in text for _, text, _ in found)
    assert f"ranks {world - 2},{world - 1}" in found[-1][1]


def counted(ctx: RankContext, tp: int) -> list[int]:
    """Return the collectives of the check in each step; sequence lengths change from step to step."""
    config = config_of(1, 1, {"stages": 1}, tensor_parallel={"autotp_size": tp})
    e, found = engine_of(config, tiny_llama(layers=4)), []
    for step in range(FIRST + 3):
        with record_collectives() as records:
            trained(e, batch(step, 4)[:, : 8 + step])
        found.append(sum(record.tag == TAG for record in records))
    e.destroy()
    return found


def test_it_costs_a_collective_in_the_first_steps_and_none_without_tp(pool: WorkerPool) -> None:
    assert pool.run(counted, 2, 2) == [[1] * FIRST + [0] * 3] * 2
    assert pool.run(counted, 2, 1) == [[0] * (FIRST + 3)] * 2


def test_a_digest_tells_places_shapes_and_values() -> None:
    def of(*tensors: Tensor) -> int:
        return int(digest({str(i): tensor for i, tensor in enumerate(tensors)}, DEVICE))

    ids = torch.arange(24)
    found = {
        of(ids), of(ids.view(4, 6)), of(ids.flip(0)), of(ids + 1), of(ids.int()), of(ids[:23]), of(ids.bool()),
        of(ids, ids), of(ids.float()), of(ids.float().flip(0)), of(ids.bfloat16()),
    }  # fmt: skip
    assert len(found) == 11 and all(0 <= one < 1 << 31 for one in found)
    assert of(ids, torch.zeros(3)) == of(ids, torch.ones(3)) != of(ids, torch.ones(4))
    assert of(ids, torch.zeros(0)) != of(ids) and of() != of(ids)
