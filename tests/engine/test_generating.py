"""Generation is the same on every topology, and equal to plain transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.engine.generating import continuation
from tests.engine.driving import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama

PROMPT, MOST = [3, 1, 4, 1, 5], 6
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "stage3": {},
    "split": {"tensor_parallel": {"autotp_size": 2}},
    "staged": {"pipeline": {"stages": 2}},
}


def written(ctx: RankContext, topology: str) -> tuple[list[int], list[int]]:
    """Return the generated tokens: up to the limit, and up to the third of these tokens."""
    config = config_of(3 if topology == "stage3" else 1, optimizer=None, **TOPOLOGIES[topology])
    engine = engine_of(config, tiny_llama())
    whole = continuation(engine, PROMPT, MOST)
    ended = continuation(engine, PROMPT, MOST, end=whole[2])
    training = engine.training
    engine.destroy()
    assert training
    return whole, ended


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_prompt_is_continued_as_by_transformers(pool: WorkerPool, topology: str) -> None:
    truth = tiny_llama().eval().generate(torch.tensor([PROMPT]), max_new_tokens=MOST, do_sample=False)
    told = truth[0, len(PROMPT) :].tolist()
    assert pool.run(written, 2, topology) == [(told, told[: told.index(told[2])])] * 2
