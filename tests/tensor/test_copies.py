"""A plan with a wrong claim about replicated tensors is detected at the first step, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import launcher
from launcher.errors import LauncherError
from tests.pool import RankContext, WorkerPool
from tests.tensor.zoo import tiny_model

NORM_SEES_A_SLICE = {"patterns": [r".*q_norm\.weight"], "partition_type": "skip"}
NORM_SEES_ALL = {"patterns": [r".*input_layernorm\.weight"], "partition_type": "skip", "grad_allreduce": True}


def train(ctx: RankContext, stage: int, rules: list[dict[str, Any]]) -> str:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": rules}},
    }
    engine = launcher.initialize(model=tiny_model("qwen3", seed=0), config=config)[0]
    ids = torch.arange(24).view(2, 12) + engine.mesh.dp.rank
    try:
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    except LauncherError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "rules", "words"),
    [
        (
            2,
            [NORM_SEES_A_SLICE],
            ["q_norm.weight", "differ between ranks but would not be summed", '"grad_allreduce": true'],
        ),
        (
            3,
            [NORM_SEES_ALL],
            [
                "input_layernorm.weight",
                "identical on all ranks but would be summed",
                '"grad_allreduce": false',
            ],
        ),
        (1, [], []),
    ],
)
def test_a_wrong_plan_is_told(pool: WorkerPool, stage: int, rules: Any, words: list[str]) -> None:
    told = pool.run(train, 4, stage, rules)
    for text in told:
        assert all(word in text for word in words) and bool(text) == bool(words)
