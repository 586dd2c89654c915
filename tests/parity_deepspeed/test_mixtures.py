"""A script's own expert layers give DeepSpeed's losses, gates and random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.integrations import gating
from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.mixtures import GATES, LAYERS, STEPS, gated, train
from tests.pool import RankContext, WorkerPool


def test_gates_say_the_same(tmp_path: Path) -> None:
    theirs = run_deepspeed("gates", None, 1, tmp_path)
    mine = gated(gating)
    assert len(mine) == len(theirs) == 2 * len(GATES)
    wrong = [
        f"{GATES[number // 2]}: {got} instead of {want}"
        for number, (got, want) in enumerate(zip(mine, theirs, strict=True))
        if not _close(got, want)
    ]
    assert not wrong, "\n".join(wrong)


def _close(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(_close, mine, theirs))
    return bool(mine == pytest.approx(theirs, rel=1e-6, abs=1e-7))


def ours(ctx: RankContext) -> list[list[float]]:
    import launcher
    from launcher.integrations.experts import MoE

    return train(launcher.initialize, MoE)


def test_losses_are_equal(pool: WorkerPool, tmp_path: Path) -> None:
    theirs = run_deepspeed("mixtures", None, 2, tmp_path)
    for mine in pool.run(ours, 2):
        for layer, got, want in zip(LAYERS, mine, theirs, strict=True):
            assert got == pytest.approx(want, rel=1e-5), layer
            assert len(got) == STEPS
