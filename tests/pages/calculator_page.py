"""Writes docs/calculator.json, the data of docs/calculator.md:  python -m tests.pages.calculator_page

All numbers come from the estimator; the page only looks them up. This takes a few minutes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from launcher.config import load
from launcher.estimate.attention_kernels import GPU_KERNELS
from launcher.estimate.estimator import Estimator
from launcher.monitor.device_budget import budget_for
from launcher.monitor.devices import device
from tests.pages.packages import ROOT

FILE = ROOT / "docs" / "calculator.json"
_LLAMA = {"model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 131_072}
_QWEN = {"model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 40_960, "head_dim": 128}
_MISTRAL = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 32_768,
}  # fmt: skip


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, groups: int, *, tied: bool = False
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "tie_word_embeddings": tied,
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": {**_LLAMA, **_sizes(2048, 8192, 16, 32, 8, tied=True)},
    "Llama 3.1 8B": {**_LLAMA, **_sizes(4096, 14_336, 32, 32, 8)},
    "Llama 3.1 70B": {**_LLAMA, **_sizes(8192, 28_672, 80, 64, 8)},
    "Qwen3 0.6B": {**_QWEN, **_sizes(1024, 3072, 28, 16, 8, tied=True)},
    "Qwen3 8B": {**_QWEN, **_sizes(4096, 12_288, 36, 32, 8)},
    "Qwen3 32B": {**_QWEN, **_sizes(5120, 25_600, 64, 64, 8)},
    "Mistral 7B": {"model_type": "mistral", "sliding_window": None, **_MISTRAL},
    "Mixtral 8x7B": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, **_MISTRAL},
    "Phi-4 14B": {
        "model_type": "phi3", "vocab_size": 100_352, "max_position_embeddings": 16_384, "pad_token_id": 0,
        **_sizes(5120, 17_920, 40, 40, 10),
    },
}  # fmt: skip
_CPU = {"device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2": {"stage": 2},
    "ZeRO 2, optimizer in host memory": {"stage": 2, "offload_optimizer": _CPU},
    "ZeRO 3": {"stage": 3},
    "ZeRO 3, optimizer in host memory": {"stage": 3, "offload_optimizer": _CPU},
    "ZeRO 3, all in host memory": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU},
}
CARDS = ("b200", "h200", "h100", "a100", "a100-40", "l40s", "a10", "rtx 4090", "l4")
RANKS, LENGTHS = (1, 8, 64, 256), (2048, 4096, 8192, 32_768)
PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "host")


def json_of(way: str, *, recomputed: bool) -> dict[str, Any]:
    """Return the ds_config.json of an entry of `WAYS`: one sequence per microbatch."""
    again: dict[str, Any] = {"activation_checkpointing": {}} if recomputed else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": WAYS[way],
        **again,
    }


def config_of(model: str) -> PretrainedConfig:
    """Return the config of a model."""
    kind = dict(MODELS[model])
    return AutoConfig.for_model(kind.pop("model_type"), **kind)


@cache
def estimator_of(model: str) -> Estimator:
    """Return the estimator of a model."""
    return Estimator(config_of(model), attention=GPU_KERNELS)


def mib(model: str, ranks: int, length: int, way: str, *, recomputed: bool) -> list[int]:
    """Return the MiB of each of `PARTS` at the peak of a step; host memory is per rank."""
    config = load(json_of(way, recomputed=recomputed))
    found = estimator_of(model).estimate(config, ranks, 0, length)
    parts = [getattr(found.at_peak, part) for part in PARTS[:-1]]
    return [round(size / 2**20) for size in (*parts, found.host)]


def cards() -> dict[str, dict[str, Any]]:
    """Return the GPUs: name, memory, and memory available to tensors on one rank and on several ranks."""
    found = {}
    for name in CARDS:
        card = device(name)
        budget = budget_for(card)
        found[card.title] = {
            "type": name,
            "memory": round(budget.memory / 2**20),
            "alone": round(budget.usable() / 2**20),
            "several": round(budget.usable((2,)) / 2**20),
        }
    return found


def table(model: str) -> list[Any]:
    """Return the sizes of a model: [ranks][length][way][not recomputed, recomputed]."""
    return [
        [
            [[mib(model, n, length, way, recomputed=again) for again in (False, True)] for way in WAYS]
            for length in LENGTHS
        ]
        for n in RANKS
    ]


def main(file: Path = FILE) -> None:
    """Write the JSON file."""
    content = {
        "parts": PARTS,
        "ranks": RANKS,
        "lengths": LENGTHS,
        "cards": cards(),
        "ways": [
            {"name": way, "json": [json_of(way, recomputed=again) for again in (False, True)]} for way in WAYS
        ],
        "models": {
            name: {
                "parameters": estimator_of(name).parameters,
                "type": MODELS[name]["model_type"],
                "mib": table(name),
            }
            for name in MODELS
        },
    }
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
