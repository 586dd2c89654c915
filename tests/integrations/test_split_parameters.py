"""Parameters split over two ranks are complete inside GatherReplacedLayerParams."""

from __future__ import annotations

import pytest
import torch

from launcher.errors import LauncherError
from launcher.integrations.split_parameters import (
    GatherReplacedLayerParams,
    LinearAllreduce,
    LinearLayer,
)
from launcher.integrations.stand_ins import initialize
from tests.engine.driving import config_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama


def read(ctx: RankContext, stage: int) -> list[int]:
    """Return how many parameters are split; all are complete inside, and unchanged outside."""
    model = tiny_llama()
    want = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = initialize(model=model, config=config_of(stage, tensor_parallel={"autotp_size": 2}))[0]
    split = 0
    for name, parameter in engine.module.named_parameters():
        before = parameter.detach().clone()
        with GatherReplacedLayerParams([parameter], engine.module):
            assert torch.equal(parameter.data, want[name]), name
        assert torch.equal(parameter.data, before)
        with GatherReplacedLayerParams(parameter, engine.module, enabled=False):
            assert parameter.shape == before.shape
        split += before.shape != want[name].shape
    some = next(one for name, one in engine.module.named_parameters() if one.shape != want[name].shape)
    with (
        pytest.raises(LauncherError, match="change is discarded"),
        GatherReplacedLayerParams(some, engine.module),
    ):
        some.data.add_(1)
    kinds = [
        sum(isinstance(module, kind) for module in engine.module.modules())
        for kind in (LinearLayer, LinearAllreduce)
    ]
    assert kinds[0] > kinds[1] > 0, kinds  # queries, keys, values beside one output
    with pytest.raises(LauncherError, match="cannot be instantiated"):
        LinearAllreduce(torch.nn.Linear(2, 2), None)
    engine.destroy()
    return [split]


@pytest.mark.parametrize("stage", [0, 2])
def test_split_parameters_are_whole_inside(pool: WorkerPool, stage: int) -> None:
    found = pool.run(read, 2, stage)
    assert found[0] == found[1] and found[0][0] > 4


def sharded(ctx: RankContext) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = config_of(3, tensor_parallel={"autotp_size": 2}, zero_optimization=zero)
    engine = initialize(model=tiny_llama(), config=config)[0]
    gathering = GatherReplacedLayerParams(engine.module.parameters(), engine.module)
    with pytest.raises(LauncherError, match="use stage 0, 1 or 2"), gathering:
        pass
    engine.destroy()


def test_sharded_parameters_are_refused(pool: WorkerPool) -> None:
    pool.run(sharded, 4)
