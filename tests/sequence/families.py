"""Tiny models of the kinds of attention that there are, and batches of the kinds of masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.pool.device import DEVICE

VOCAB = 61
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,  # with a cache transformers does not look for documents
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
"""Sizes of DeepSeek's attention."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", {}),
    "deep": ("llama", {"num_hidden_layers": 4}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "norms of q and k": ("qwen3", {"head_dim": 8}),
    "windows here and there": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "caps": ("gemma2", {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 3.0}),
    "sinks": (
        "gpt_oss",
        {"head_dim": 8, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "latent": (
        "deepseek_v3",
        {
            **LATENT,
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 4},
            **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4},
        },
    ),
    "partial rotary": ("gpt_neox", {"rotary_pct": 0.5}),
    "window": ("mistral", {"sliding_window": 5}),
    "rotary by length": (
        "llama",
        {
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "rotary of long": (
        "phi3",
        {
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0},
                **{"original_max_position_embeddings": 20},
                **{"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]},
            },
        },
    ),
    "chunks": (
        "llama4_text",
        {
            **{"head_dim": 8, "attention_chunk_size": 6, "no_rope_layers": [1, 0], "floor_scale": 64},
            **{"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            "intermediate_size_mlp": 40,
        },
    ),
    "experts": ("mixtral", {"num_local_experts": 2}),
}


def model_of(family: str) -> PreTrainedModel:
    """In fp32 and training mode, without dropout; the same values on every rank."""
    kind, more = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**_BASE, **more})
    for key in ("attention_dropout", "hidden_dropout", "attn_pdrop"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="eager"
        )
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return model.train()


def plain(step: int, length: int) -> dict[str, Tensor]:
    """Two rows, without a mask."""
    ids = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids.to(DEVICE), "labels": ids.to(DEVICE)}


def packed(step: int, length: int) -> dict[str, Tensor]:
    """Documents that lie end to end; their borders differ from row to row."""
    batch = plain(step, length)
    places = torch.arange(length, device=DEVICE)
    borders = torch.tensor([[length // 3], [length // 2 + 1]], device=DEVICE)
    return {**batch, "position_ids": torch.where(places < borders, places, places - borders)}


def left_padded(step: int, length: int) -> dict[str, Tensor]:
    """Padding before one of the rows."""
    batch = plain(step, length)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, : length // 4] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


BATCHES: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
    "plain": plain,
    "packed": packed,
    "left padded": left_padded,
}
