"""Models cut into stages train as one process does."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.pipeline.running import CLIP, LR, advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_gpt2, tiny_llama, train_plain

STEPS = 3


def train(
    ctx: RankContext,
    stages: int,
    schedule: str,
    stage: int,
    microbatches: int,
    tied: bool,
    kind: str = "llama",
) -> dict[str, Any]:
    model = tiny_llama(tied, layers=4) if kind == "llama" else tiny_gpt2(tied, layers=4)
    engine = engine_of(config_of(stage, microbatches, {"stages": stages, "schedule": schedule}), model)
    losses, norms = advance(engine, range(STEPS))
    found = {
        "losses": losses,
        "norms": norms,
        "weights": whole_weights(engine),
        "held": engine.runtime.most_held,
    }
    engine.destroy()
    return found


@cache
def truth(tied: bool, kind: str = "llama") -> PlainRun:
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    model = tiny_llama(tied, layers=4) if kind == "llama" else tiny_gpt2(tied, layers=4)
    return train_plain(model, batch, adamw, STEPS, clip=CLIP)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_two_stages(pool: WorkerPool, schedule: str, stage: int, tied: bool) -> None:
    want = truth(tied)
    for got in pool.run(train, 2, 2, schedule, stage, 4, tied):
        assert got["losses"] == pytest.approx(want.losses, rel=1e-5)
        assert got["norms"] == pytest.approx(want.grad_norms, rel=1e-5)
        assert got["weights"].keys() == want.weights.keys()
        for name, weight in want.weights.items():
            assert (got["weights"][name] - weight).norm() / weight.norm() < 1e-5, name
