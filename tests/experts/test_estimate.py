"""The estimate for expert parallelism matches a dry run of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

import launcher
from launcher.config import load
from launcher.estimate.dry_run import dry_run, rehearse
from launcher.estimate.estimator import Estimator
from launcher.estimate.live import LiveBytesMode
from launcher.estimate.model_trace import expert_load
from launcher.experts.load import ExpertLoad
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE

WORLD, SEQUENCE = 4, 64
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_local_experts": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("stage", "size", "more"),
    [
        (1, 2, {}),
        (3, 2, {}),
        (2, 4, {}),
        (1, 4, {"expert_parallel": {"size": 4, "dispatch": "tokens"}}),
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


def uneven(ctx: RankContext, config: dict[str, Any]) -> tuple[int, float]:
    """Return (the peak of a real step, the load of the busiest rank), with skewed routers."""
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS)).train()
    model.model.embed_tokens.weight.data += 0.02
    for layer in model.model.layers:  # which positive hidden states like
        layer.mlp.gate.weight.data[:4] += 0.005
    loads = []

    def make(live: Any) -> Any:
        engine: Any = launcher.initialize(model=model, config=config, device=DEVICE)[0]
        loads.append(ExpertLoad(engine.module, engine.mesh, ranks=2))
        return engine

    peak = rehearse(make, SEQUENCE, LiveBytesMode).peak
    return peak, loads[0].take()["expert_rank_load"]


@pytest.mark.parametrize(("stage", "dispatch"), [(1, "pairs"), (3, "pairs"), (1, "tokens")])
def test_the_estimate_at_a_measured_load(pool: WorkerPool, stage: int, dispatch: str) -> None:
    """For the most loaded rank; with a uniform load the estimate would be too low."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"size": 2, "dispatch": dispatch},
    }
    measured = pool.run(uneven, 2, config)
    peak, factor = max(peak for peak, _ in measured), measured[0][1]
    assert factor > 1.2
    model = MixtralConfig(**SIZES, **HEADS)
    found = Estimator(model, factor).estimate(load(config), 2, sequence=SEQUENCE).peak
    even = Estimator(model).estimate(load(config), 2, sequence=SEQUENCE).peak
    assert found == pytest.approx(peak, rel=0.05) and even < 0.97 * peak
    with expert_load(load(config), factor):
        played = dry_run(Estimator(model).copy(), load(config), world=2, sequence=SEQUENCE)
    assert played.peak == pytest.approx(found, rel=0.02)
