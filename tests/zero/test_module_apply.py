"""`model.apply(fn)` at stage 3: fn gets full parameters, and rank 0's changes are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.comm import record_collectives
from launcher.errors import ShardedParameterError
from tests.engine.driving import advance, config_of, engine_of, whole_state, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)
        nn.init.zeros_(module.bias)


def apply_and_train(ctx: RankContext, threshold: int) -> tuple[dict[str, torch.Tensor], list[str], int]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    engine = engine_of(config_of(3, zero_optimization=zero))
    advance(engine, ctx, [0])
    order: list[str] = []
    engine.module.apply(lambda module: order.append(type(module).__name__))
    torch.manual_seed(5 + ctx.rank)
    with record_collectives() as records:
        assert engine.module.apply(initialise) is engine.module
    gathers = sum(r.op == "all_gather" for r in records)
    engine.module.blocks[0].apply(lambda module: None)
    whole, master = whole_weights(engine), whole_state(engine)
    assert all(torch.equal(master[name], whole[name].view(-1)) for name in whole)
    advance(engine, ctx, [1])
    return whole, order, gathers


@pytest.mark.key("zero_optimization.override_module_apply")
@pytest.mark.parametrize("threshold", [0, 20])
def test_apply_gathers_and_keeps_rank_0s_changes(pool: WorkerPool, threshold: int) -> None:
    """The same modules in torch's order, and the values of one process with rank 0's seed."""
    plain = stack()
    order: list[str] = []
    plain.apply(lambda module: order.append(type(module).__name__))
    torch.manual_seed(5)
    plain.apply(initialise)
    for got, called, gathers in pool.run(apply_and_train, 2, threshold):
        assert called == order
        assert gathers <= 6  # a unit once, and the root beside the blocks
        for name, p in plain.named_parameters():
            if name not in ("scale", "offset"):
                assert torch.equal(got[name], p), name


def refused(ctx: RankContext) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "override_module_apply": False}
    engine = engine_of(config_of(3, zero_optimization=zero))
    with pytest.raises(ShardedParameterError, match=r"blocks\.0\.up\.weight|first\.weight"):
        engine.module.apply(initialise)


@pytest.mark.key("zero_optimization.override_module_apply")
def test_false_leaves_torchs_apply(pool: WorkerPool) -> None:
    pool.run(refused, 2)


def plain_again(ctx: RankContext) -> None:
    engine = engine_of(config_of(3))
    engine.destroy()
    assert not any("apply" in module.__dict__ for module in engine.module.modules())


def test_destroy_gives_torchs_apply_back(pool: WorkerPool) -> None:
    pool.run(plain_again, 2)
