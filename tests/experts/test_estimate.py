"""The estimate of spread experts is what the engine does, rehearsed."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MixtralConfig

from launcher.config import load
from launcher.estimate.dry_run import dry_run
from launcher.estimate.estimator import Estimator

WORLD, SEQUENCE = 4, 64
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_local_experts": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("stage", "size", "more"),
    [
        (1, 2, {}),
        (3, 2, {}),
        (2, 4, {}),
        (1, 2, {"pipeline": {"stages": 2}}),
        (1, 4, {"tensor_parallel": {"autotp_size": 2}}),
    ],
)
def test_the_estimate_is_what_the_engine_does(stage: int, size: int, more: dict[str, Any]) -> None:
    config = load(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "expert_parallel": {"size": size},
            **more,
        }
    )
    made = Estimator(MixtralConfig(**SIZES, **HEADS))
    found = made.estimate(config, WORLD, sequence=SEQUENCE)
    played = dry_run(made.copy(), config, world=WORLD, sequence=SEQUENCE)
    assert found.peak == pytest.approx(played.peak, rel=0.02)
    assert found.between.total == pytest.approx(played.between.total, rel=0.01)
