"""Pipeline, data and tensor parallelism together."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.pipeline.running import CLIP, LR, advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_llama, train_plain

STEPS, MICROBATCHES = 4, 2

EPS = (
    1e-4  # with 1e-8 AdamW makes steps of the rounding of gradients near zero, which differs from CPU to CPU
)

TWICE = {"every": 1, "resting": True, "replay_every": 2}
"""Steps are computed again, and compared: which changes nothing."""


def train(
    ctx: RankContext,
    pp: int,
    tp: int,
    schedule: str,
    stage: int,
    tied: bool,
    sequence: bool,
    sections: dict[str, Any],
) -> dict[str, Any]:
    partition = "profile" if sequence and tied else "best"  # where layers are split and sequences sliced
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1, "eps": EPS}}
    sections = {**sections, "optimizer": adamw}
    config = config_of(
        stage,
        MICROBATCHES,
        {"stages": pp, "schedule": schedule, "partition": partition},
        tensor_parallel={"autotp_size": tp, "sequence_parallel": sequence},
        **sections,
    )
    engine = engine_of(config, tiny_llama(tied, layers=4))
    losses, norms = advance(engine, range(STEPS))
    return {"losses": losses, "norms": norms, "weights": whole_weights(engine)}


@cache
def truth(tied: bool, microbatches: int) -> PlainRun:
    """Train one process with the microbatches of all ranks: others round differently, and AdamW amplifies that."""
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1, eps=EPS)
    return train_plain(tiny_llama(tied, layers=4), batch, adamw, STEPS, microbatches, CLIP)


@pytest.mark.pairwise
@pytest.mark.parametrize(("world", "pp", "tp", "schedule", "stage", "tied", "sequence", "sections"), [
    (4, 2, 1, "1f1b", 2, True, False, {}),
    (4, 2, 1, "zbv", 3, False, False, {"activation_checkpointing": {}, "replica_check": TWICE}),
    (4, 2, 2, "1f1b", 1, True, False, {}),
    (4, 2, 2, "zb-h1", 3, True, False, {"replica_check": TWICE}),
    (4, 2, 2, "interleaved", 0, False, True, {"replica_check": TWICE}),
    (4, 2, 2, "1f1b", 1, True, True, {"activation_checkpointing": {}}),
    pytest.param(8, 2, 2, "1f1b", 1, True, False, {}, marks=pytest.mark.full),
    (8, 2, 2, "zb-h1", 3, False, True, {}),
], ids=str)  # fmt: skip
def test_as_one_process(pool: WorkerPool, world: int, pp: int, tp: int, schedule: str, stage: int, tied: bool,
                        sequence: bool, sections: dict[str, Any]) -> None:  # fmt: skip
    want = truth(tied, MICROBATCHES * world // (pp * tp))
    for got in pool.run(train, world, pp, tp, schedule, stage, tied, sequence, sections):
        assert got["losses"] == pytest.approx(want.losses, rel=1e-5)
        assert got["norms"] == pytest.approx(want.grad_norms, rel=1e-5)
        assert got["weights"].keys() == want.weights.keys()
        for name, weight in want.weights.items():
            off = (got["weights"][name] - weight).norm() / weight.norm()
            assert off < 1e-5, name
