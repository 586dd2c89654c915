"""An exception in the middle of a forward or backward, on all ranks, leaves the engine usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.driving import STAGES, advance, config_of, engine_of, microbatches
from tests.pool import RankContext, WorkerPool
from tests.zero.models import Stack


class Failing(Stack):
    """Fails on request: in the middle of the forward, or of the backward."""

    fails = ""

    def forward(self, x: Tensor, y: Tensor, use_spare: bool = False) -> Tensor:
        handles = []
        if self.fails == "forward":
            handles.append(self.blocks[1].up.register_forward_pre_hook(fail))
        if self.fails == "backward":
            handles.append(self.blocks[1].up.register_forward_hook(fail_backwards))
        try:
            return super().forward(x, y, use_spare)
        finally:
            for handle in handles:
                handle.remove()


def fail(*args: Any) -> None:
    raise KeyError("on purpose")


def fail_backwards(module: Any, args: Any, output: Tensor) -> None:
    output.register_hook(fail)


def fail_and_go_on(ctx: RankContext, stage: int, where: str) -> None:
    plain = engine_of(config_of(stage), Failing())
    engine = engine_of(config_of(stage), Failing())
    with torch.no_grad():  # the same weights
        for piece, same in zip(engine.zero.slices(), plain.zero.slices(), strict=True):
            piece.data.copy_(same.data)
    engine.zero.publish()
    assert advance(engine, ctx, [0]) == advance(plain, ctx, [0])
    engine.module.fails = where
    with pytest.raises(KeyError, match="on purpose"):
        for part in microbatches(ctx, 1):
            engine.backward(engine(*part))
    engine.module.fails = ""
    engine.abandon_step()
    assert advance(engine, ctx, range(1, 5)) == advance(plain, ctx, range(1, 5))
    assert torch.equal(torch.ones(2, requires_grad=True).square().sum(), torch.tensor(2.0))


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_the_engine_usable(pool: WorkerPool, stage: int, where: str) -> None:
    """The exception is on all ranks, as with a bad batch; the repeated step gives the same results."""
    pool.run(fail_and_go_on, 2, stage, where)
