"""The recipes' `--decay`: which parameters decay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import launcher
from launcher.run import Run
from tests.engine.driving import whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_llama


def decayed(ctx: RankContext, stage: int, decay: str) -> dict[str, float]:
    """Return the norms of the parameters after steps with weight decay alone."""
    model = tiny_llama(tied=True, layers=1, vocab=31, seed=0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    groups = Run.param_groups(cast("Any", SimpleNamespace(args=SimpleNamespace(decay=decay))), model)
    config = {
        "train_batch_size": ctx.world,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
    }
    engine = launcher.initialize(model=model, model_parameters=groups, config=config, device=DEVICE)[0]
    ids = torch.zeros(1, 4, dtype=torch.long)
    engine.backward(engine(input_ids=ids, labels=ids).loss * 0.0)
    engine.step()
    after = whole_weights(engine)
    engine.destroy()
    return {name: (after[name].norm() / before[name].norm()).item() for name in before}


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (3, 2)])
def test_vectors_do_not_decay(pool: WorkerPool, stage: int, world: int) -> None:
    for decay in ("all", "matrices"):
        found = pool.run(decayed, world, stage, decay)[0]
        assert found
        for name, ratio in found.items():
            kept = decay == "matrices" and name.endswith("norm.weight")
            assert ratio == pytest.approx(1.0 if kept else 0.95, abs=1e-5), (decay, name)
