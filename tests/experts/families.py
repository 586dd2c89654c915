"""Tiny models of the kinds of experts that there are, and the global batch of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.pool.device import DEVICE
from tests.sequence.families import LATENT

VOCAB = 61
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("mixtral", {"num_local_experts": 4}),
    "uneven": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "all": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}),
    "tied": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    "router loss": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
    "shared expert": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24},
    ),
    "groups and dense layers": (
        "deepseek_v3",
        {
            **LATENT,
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "head_dim": 4},
            **{"first_k_dense_replace": 1, "num_key_value_heads": 4},
        },
    ),
    "biases": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "one for all tokens": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "shared by layers": ("mixtral", {"num_local_experts": 4}),
    "deep": ("mixtral", {"num_local_experts": 4, "num_hidden_layers": 4}),
}


def model_of(family: str, implementation: str = "eager") -> PreTrainedModel:
    """In fp32 and training mode, without dropout; the same values on every rank."""
    kind, more = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**_BASE, **more})
    for key in ("attention_dropout", "hidden_dropout", "attn_pdrop"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation=implementation
        )
    if family == "shared by layers":
        first, second = (layer.mlp.experts for layer in model.model.layers)
        second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        if family == "one for all tokens" and name.endswith("gate.weight"):
            torch.nn.init.zeros_(parameter)
    return model.train()


def global_batch(step: int, rows: int) -> list[Tensor]:
    """The rows of a step, [1, tokens] each: every other one is longer."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randint(0, VOCAB, (1, 12 + 5 * (row % 2)), generator=generator).to(DEVICE)
        for row in range(rows)
    ]
