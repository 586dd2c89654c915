"""The same layers, JSON and data in DeepSpeed's pipeline and in ours give the same initial values (seed_layers) and
losses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.rows import STEPS, config_of, module_of, train
from tests.pool import RankContext, WorkerPool

CASES = [(stage, tied) for stage in (0, 1) for tied in (False, True)]


def ours(ctx: RankContext) -> list[list[float]]:
    import launcher

    return [
        train(
            launcher.initialize(
                model=module_of(launcher.pipe, tied=tied), config=config_of(stage, tied=tied)
            )[0]
        )
        for stage, tied in CASES
    ]


def test_losses_are_equal(pool: WorkerPool, tmp_path: Path) -> None:
    theirs = run_deepspeed("rows", CASES, 2, tmp_path)
    for mine in pool.run(ours, 2):
        for got, want in zip(mine, theirs, strict=True):
            assert got == pytest.approx(want, rel=1e-5)
            assert len(got) == STEPS + 1 and got[-2] < 0.9 * got[0]
