"""Configs of one small model per family."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_COMMON: dict[str, Any] = {"vocab_size": 72, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_LLAMA_LIKE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_KEYS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen2": {**_LLAMA_LIKE, "tie_word_embeddings": True},
    "mixtral": {**_LLAMA_LIKE, "num_local_experts": 4},
    "gpt2": {**_COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**_LLAMA_LIKE, "num_key_value_heads": 4},
    "gpt_neo": {
        **_COMMON,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "opt": {**_LLAMA_LIKE, "ffn_dim": 56, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "mamba": {**_COMMON, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
    "openai-gpt": {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bert": {**_LLAMA_LIKE, "num_hidden_layers": 2, "is_decoder": True},
}
FAMILIES = sorted(_KEYS)


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **{**_KEYS[family], **changes})
