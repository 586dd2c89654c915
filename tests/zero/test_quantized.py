"""ZeRO++'s quantized gathers and reductions: the saved bytes, and the effect on losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.comm import CollectiveRecord
from launcher.comm.quantized import packed_bytes
from launcher.zero import GatheredParameters
from tests.engine.driving import advance, engine_of, whole_weights
from tests.engine.driving import config_of as stack_config
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack
from tests.zero.test_memory_and_communication import sent
from tests.zero.training import Case, Trained, train

ZERO = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}


def run(pool: WorkerPool, world: int, stage: int, **zero: Any) -> Trained:
    return pool.run(train, world, Case(stage, zero={**ZERO, **zero}))[0]


def packed(records: list[CollectiveRecord], bits: int, world: int) -> int:
    """Return what these fp32 collectives send when their slices are quantized."""
    return sum(packed_bytes(r.numel // world, bits) * (world - 1) for r in records)


@pytest.mark.key("zero_optimization.zero_quantized_weights")
def test_quantized_weights(pool: WorkerPool) -> None:
    """A quarter of the bytes of every gather; losses within 0.5 % over 10 steps, as they fall from 4.15 to 2.28."""
    plain, short = run(pool, 2, 3), run(pool, 2, 3, **WEIGHTS)
    gathers = [r for r in plain.records if r.op == "all_gather"]
    got = sum(r.sent for r in short.records if r.op == "all_gather")
    assert got == packed(gathers, 8, 2)
    assert got / sum(r.sent for r in gathers) == pytest.approx(1 / 3.94, rel=0.01)
    assert sent(short.records, "reduce_scatter", "backward") == sent(
        plain.records, "reduce_scatter", "backward"
    )
    assert short.losses != plain.losses
    assert short.losses == pytest.approx(plain.losses, rel=5e-3)


@pytest.mark.key("zero_optimization.zero_quantized_gradients")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_quantized_gradients(pool: WorkerPool, stage: int) -> None:
    """An eighth of the bytes of every reduction; losses within 2 % over 10 steps."""
    plain, short = run(pool, 2, stage), run(pool, 2, stage, **GRADIENTS)
    reductions = [r for r in plain.records if r.op == "reduce_scatter"]
    got = [r for r in short.records if r.op == "all_to_all"]
    assert not [r for r in short.records if r.op == "reduce_scatter"]
    assert sum(r.sent for r in got) == packed(reductions, 4, 2)
    assert sum(r.sent for r in got) / sum(r.sent for r in reductions) == pytest.approx(1 / 7.76, rel=0.01)
    assert short.losses != plain.losses
    assert short.losses == pytest.approx(plain.losses, rel=2e-2)


FROZEN = stack_config(3, zero_optimization={"stage": 3, "zero_quantized_nontrainable_weights": True, **ZERO})


def frozen(ctx: RankContext, directory: Path) -> tuple[list[float], list[float], list[int], list[int]]:
    """Return (losses without, losses with quantization, bytes held without, with).

    Checkpoints keep the quantized values.
    """
    runs = []
    for config in (stack_config(3, zero_optimization={"stage": 3, **ZERO}), FROZEN):
        engine = engine_of(config, stack(width=32, frozen=(0, 1)))
        start = whole_weights(engine)
        runs.append((advance(engine, ctx, range(4)), engine.held_bytes()["parameters"]))
    after = whole_weights(engine)
    same = [name for name in start if torch.equal(start[name], after[name])]
    assert {name.rpartition(".")[0] for name in same} >= {"blocks.0.up", "blocks.1.down"}
    engine.save_checkpoint(directory)
    other = engine_of(FROZEN, stack(seed=1, width=32, frozen=(0, 1)))
    other.load_checkpoint(directory)
    for name, value in whole_weights(other).items():
        assert torch.equal(value, after[name]), name
    with GatheredParameters(other.module.parameters(), modifier_rank=1):
        other.module.blocks[0].up.weight.data.fill_(ctx.rank)
    assert whole_weights(other)["blocks.0.up.weight"].eq(1).all()
    (plain, held), (packed_losses, packed_held) = runs
    return plain, packed_losses, [held], [packed_held]


@pytest.mark.key("zero_optimization.zero_quantized_nontrainable_weights")
def test_frozen_parameters_rest_quantised(pool: WorkerPool, tmp_path: Path) -> None:
    """A quarter of the bytes, also between steps; checkpoints and edits support it."""
    model = stack(width=32, frozen=(0, 1))
    still = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    for plain, short, (held,), (packed_held,) in pool.run(frozen, 2, tmp_path):
        assert held - packed_held == pytest.approx(4 * still / 2 * (1 - 1 / 3.94), rel=0.02)
        assert short != plain and short == pytest.approx(plain, rel=1e-2)
