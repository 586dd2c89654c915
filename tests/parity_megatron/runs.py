"""Runs that Megatron-Core and launcher begin, save, and go on with: models, data, steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BEFORE, AFTER = 3, 5  # steps
ROWS, TOKENS, VOCABULARY = 4, 12, 96
RATE, DECAY = 1e-2, 0.1
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "initializer_range": 0.1, "router_aux_loss_coef": 0.0, "use_cache": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "tie_word_embeddings": False},
    "llama-biased": {
        "model_type": "llama",
        **_SIZES,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", **_SIZES, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 16},
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1, "use_cache": False,
    },
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    # `optimizer`: Megatron's class; `tp`, `pp`: Megatron's; `stage`, `ranks`: launcher's.
    {"model": "llama", "optimizer": "plain", "tp": 1, "pp": 1, "world": 1, "stage": 3, "ranks": 2},
    {"model": "llama", "optimizer": "distributed", "tp": 2, "pp": 2, "world": 4, "stage": 1, "ranks": 1},
    {"model": "llama-biased", "optimizer": "distributed", "tp": 2, "pp": 1, "world": 2, "stage": 0, "ranks": 2},
    {"model": "mistral", "optimizer": "distributed", "tp": 1, "pp": 1, "world": 2, "stage": 2, "ranks": 2},
    {"model": "qwen2", "optimizer": "plain", "tp": 2, "pp": 2, "world": 4, "stage": 3, "ranks": 1},
    {"model": "qwen3", "optimizer": "plain", "tp": 1, "pp": 2, "world": 2, "stage": 1, "ranks": 2},
    {"model": "mixtral", "optimizer": "distributed", "tp": 1, "pp": 1, "world": 1, "stage": 3, "ranks": 2},
    {"model": "qwen3_moe", "optimizer": "plain", "tp": 1, "pp": 2, "world": 2, "stage": 2, "ranks": 1},
    {"model": "gpt2", "optimizer": "distributed", "tp": 2, "pp": 1, "world": 2, "stage": 3, "ranks": 2},
    {"model": "gpt2", "optimizer": "plain", "tp": 1, "pp": 1, "world": 1, "stage": 1, "ranks": 2},
    {"model": "llama", "optimizer": "distributed", "tp": 1, "pp": 1, "world": 2, "stage": 3, "ranks": 2,
     "dtype": "bf16"},
    {"model": "qwen2", "optimizer": "plain", "tp": 2, "pp": 1, "world": 2, "stage": 1, "ranks": 2, "dtype": "bf16"},
]  # fmt: skip


def batch(step: int) -> Tensor:
    """Token ids [ROWS, TOKENS + 1] of a step."""
    return torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def write_config(model: str, directory: Path) -> Path:
    """Write config.json of a model; return its directory."""
    from transformers import AutoConfig

    place = directory / f"config-{model}"
    AutoConfig.for_model(**MODELS[model]).save_pretrained(place)
    return place


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())
