"""Degree x ZeRO stage x precision x sequence parallelism match one process's losses over 10 steps."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from launcher.comm import Mesh
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_llama, train_plain
from tests.tensor.running import CLIP, LR, advance, config_of, engine_of

STEPS, VOCAB = 10, 67
STAGES, SEQUENCE = (0, 1, 2, 3), (False, True)
PRECISION: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
# bf16 keeps 8 bits of a number: every rank's partial sum is rounded once more than one process's whole one
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
Losses = dict[tuple[int, bool], list[float]]


def losses_of(ctx: RankContext, tp: int, precision: str) -> Losses:
    """Return losses by stage and sequence parallelism; all runs use one mesh."""
    build = cache(Mesh.build)
    found: Losses = {}
    with patch.object(Mesh, "build", build):
        for stage, sequence in product(STAGES, SEQUENCE if tp > 1 else [False]):
            config = config_of(stage, **PRECISION[precision])
            engine = engine_of(tp, config, tiny_llama(layers=1, vocab=VOCAB), sequence=sequence)
            found[stage, sequence] = advance(engine, range(STEPS))[0]
            engine.destroy()
    return found


@cache
def truth() -> PlainRun:
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    return train_plain(tiny_llama(layers=1, vocab=VOCAB), batch, adamw, STEPS, clip=CLIP)


@pytest.mark.pairwise
@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_losses_are_those_of_one_process(pool: WorkerPool, tp: int, precision: str) -> None:
    alone = partial(pool.run, losses_of, 1, 1, precision)
    want = truth().losses if precision == "fp32" else alone()[0][0, False]
    for found in pool.run(losses_of, 4, tp, precision):
        assert len(found) == len(STAGES) * len(SEQUENCE)
        for case, losses in found.items():
            assert losses == pytest.approx(want, rel=TOLERANCE[precision]), case
