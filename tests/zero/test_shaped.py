"""Deferred gradients reach sharded parameters without gathering them, unless a hook reads the weight."""

from __future__ import annotations

import pytest
import torch

from launcher.comm import record_collectives
from launcher.zero.reduce import BackwardPlan
from tests.engine.driving import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.zero.models import Stack


def give_gradients(ctx: RankContext, watches: bool) -> tuple[int, list[float], list[bool]]:
    """Return the number of gathered units, all gradients, and whether a hook of the script saw the weight."""
    zero = engine_of(config_of(3), Stack()).zero
    slots = [slot for slot in zero.trainable_slots if slot.flat.sharded]
    leaves, seen = [slot.leaf for slot in slots], list[bool]()
    with zero.gathered():
        weight = leaves[0].detach().clone()
    if watches:
        leaves[0].register_hook(lambda gradient: seen.append(torch.equal(leaves[0].detach(), weight)))
    zero.reducer.plan = BackwardPlan(unit_names=())
    with record_collectives() as records, zero.shaped(leaves):
        torch.autograd.backward(leaves, [torch.full(slot.shape, ctx.rank + 1.0) for slot in slots])
    assert all(leaf.numel() == 0 for leaf in leaves)
    views = [view for gradient in zero.gradients for _, view in gradient.flat.owned_views(gradient.owned)]
    values = torch.cat(views).unique()
    return sum(record.op == "all_gather" for record in records), values.tolist(), seen


@pytest.mark.parametrize("watches", [False, True])
def test_of_sharded_parameters(pool: WorkerPool, watches: bool) -> None:
    for gathered, values, seen in pool.run(give_gradients, 2, watches):
        assert gathered == watches
        assert seen == [True] * watches
        assert len(values) == 1
