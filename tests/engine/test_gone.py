"""An engine without references leaves nothing behind: a notebook, a hyperparameter search, a second Trainer."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch

import launcher
from tests.engine.driving import advance, config_of, engine_of
from tests.pipeline import running as stages
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_llama

OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, offloaded": {"stage": 3, "zero_optimization": OFFLOADED},
    "tensor parallel": {"stage": 1, "tensor_parallel": {"autotp_size": 2}},
    "stages": {"stage": 1, "pipeline": {"stages": 2, "schedule": "zb-h1"}},
}


def one_life(ctx: RankContext, case: dict[str, Any]) -> list[weakref.ref[Any]]:
    """Train a step; return weak references to objects that must be freed afterwards."""
    if "pipeline" in case:
        engine = stages.engine_of(stages.config_of(case["stage"], 2, case["pipeline"]), tiny_llama(layers=2))
        stages.advance(engine, range(1))
    elif "tensor_parallel" in case:
        engine = launcher.initialize(model=tiny_llama(layers=2), config=config_of(**case), device=DEVICE)[0]
        ids = torch.arange(32).view(8, 4)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    else:
        engine = engine_of(config_of(**case))
        advance(engine, ctx, range(1))
    return [weakref.ref(thing) for thing in (engine, engine.zero, engine.module, engine.optimizer)]


def left_by(ctx: RankContext, case: dict[str, Any]) -> tuple[list[bool], int]:
    """Return (objects that still exist, file descriptors that two more engines left open)."""
    first = one_life(ctx, case)
    gc.collect()
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        one_life(ctx, case)
    gc.collect()
    return [thing() is not None for thing in first], len(os.listdir("/proc/self/fd")) - open_files


@pytest.mark.parametrize("name", CASES)
def test_an_engine_that_nobody_holds_is_gone(pool: WorkerPool, name: str) -> None:
    for there, files in pool.run(left_by, 2, CASES[name]):
        assert there == [False] * 4 and files <= 0
