"""Runs that train only LoRA adapters: the estimate matches a dry run of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from launcher.config import load
from launcher.errors import ConfigError
from launcher.estimate.attention_kernels import GPU_KERNELS, attention_of
from launcher.estimate.dry_run import dry_run
from launcher.estimate.estimator import Estimator
from launcher.estimate.quantized import pack_frozen
from launcher.models.adapters import LoraSettings, with_adapters
from launcher.models.build import build_on_meta

pytest.importorskip("peft")
TOKENS, HOST = 256, {"device": "cpu"}
SCRATCH = 2.2 * 2**20  # of a step on the host, which the rehearsal takes for memory of the device
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {}),
    "stage 2": (2, {"zero_optimization": {"stage": 2}}),
    "stage 3": (2, {"zero_optimization": {"stage": 3}}),
    "recomputed": (2, {"zero_optimization": {"stage": 3}, "activation_checkpointing": {}}),
    "on the host": (
        2,
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
        },
    ),
    "split layers": (2, {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}),
    "split layers and sequences": (
        4,
        {
            "zero_optimization": {"stage": 3},
            "tensor_parallel": {"autotp_size": 2, "sequence_parallel": True},
        },
    ),
    "stages": (2, {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}),
    "stages, zero bubble": (
        4,
        {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2, "schedule": "zb-h1"}},
    ),
    "sequences shared": (2, {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}),
}


def adapted(targets: str = "all-linear") -> nn.Module:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4000, use_cache=False,
    )  # fmt: skip
    return with_adapters(build_on_meta(config), LoraSettings.of(8, targets))


def config_of(**sections: Any) -> Any:
    return load(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            **sections,
        }
    )


@pytest.mark.parametrize("name", RUNS)
def test_as_the_real_engine(name: str) -> None:
    world, sections = RUNS[name]
    config = config_of(**sections)
    found = Estimator(adapted(), attention=GPU_KERNELS).estimate(config, world, 0, TOKENS)
    with attention_of(GPU_KERNELS, set()):
        played = dry_run(adapted(), config, world=world, sequence=TOKENS)
    assert found.peak == pytest.approx(played.peak, rel=0.02, abs=SCRATCH)
    assert found.between.total == pytest.approx(played.between.total, rel=0.02, abs=SCRATCH)
    assert found.host == pytest.approx(played.host, rel=0.05)


@pytest.mark.parametrize("stage", [2, 3])
def test_four_bits_per_weight(stage: int) -> None:
    """The numbers of real runs of bitsandbytes 0.50 on two ranks, from torch's allocation records."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4000, use_cache=False,
    )  # fmt: skip
    model = pack_frozen(with_adapters(build_on_meta(config), LoraSettings.of(8)))
    estimator = Estimator(model)
    assert (
        estimator.parameters == Estimator(with_adapters(build_on_meta(config), LoraSettings.of(8))).parameters
    )
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    found = estimator.estimate(config_of(zero_optimization=zero, gradient_clipping=0.0), 2, 0, TOKENS)
    between, step = {2: (24.90, 96.08), 3: (35.82, 97.48)}[stage]
    assert found.between.total / 2**20 == pytest.approx(between, rel=0.005)
    assert (found.peak - found.between.total) / 2**20 == pytest.approx(step, rel=0.02)


def test_only_frozen_layers_are_packed() -> None:
    with pytest.raises(ConfigError, match="no frozen linear layers"):
        pack_frozen(build_on_meta(LlamaConfig(num_hidden_layers=1)))


def test_what_is_trained_is_counted() -> None:
    estimator = Estimator(adapted("q_proj, v_proj"))
    assert estimator.trained == 4 * 8 * ((256 + 256) + (256 + 128))
    assert all(not p.requires_grad or "lora" in name for name, p in estimator.model.named_parameters())
    assert {p.device for p in estimator.model.parameters()} == {torch.device("meta")}


def test_packed_weights_are_not_split() -> None:
    config = config_of(tensor_parallel={"autotp_size": 2})
    with pytest.raises(ConfigError, match=r"quantized to packed bytes[^!]*tensor_parallel"):
        Estimator(pack_frozen(adapted())).estimate(config, 2, 0, TOKENS)


def test_packed_weights_in_stages() -> None:
    stages = config_of(pipeline={"stages": 2})
    four, full = (
        Estimator(model).estimate(stages, 2, 0, TOKENS) for model in (pack_frozen(adapted()), adapted())
    )
    assert four.between.total < 0.6 * full.between.total  # embeddings are not packed


def test_layers_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match=r"nope[^!]*--lora-targets"):
        adapted("nope")
