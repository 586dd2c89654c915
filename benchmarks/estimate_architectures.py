"""The estimate beside the engine itself: architectures that it was not made with, in several ways of running them.

    python -m benchmarks.estimate_architectures [ARCHITECTURE ...]

Writes `results/estimate_architectures.md`. The engine takes three steps with tensors that have no memory (`--dry-run`):
what it allocates is counted operation by operation. Nothing is timed; it takes some ten minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig

from launcher.config import load
from launcher.errors import ConfigError
from launcher.estimate.dry_run import dry_run
from launcher.estimate.estimator import Estimator

RESULTS = Path(__file__).with_name("results") / "estimate_architectures.md"
SEQUENCE = 256
_SIZE = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 32_000}
_GATED = {**_SIZE, "intermediate_size": 1024, "max_position_embeddings": 512, "num_key_value_heads": 4}
_WIDE = {**_GATED, "head_dim": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": _WIDE,
    "gemma2": {**_WIDE, "query_pre_attn_scalar": 64},
    "gemma3_text": {**_WIDE, "query_pre_attn_scalar": 64},
    "mixtral": {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_WIDE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "gpt_neox": {**_SIZE, "intermediate_size": 1024, "max_position_embeddings": 512},
    "falcon": _SIZE,
    "phi3": {**_GATED, "pad_token_id": 0},
    "opt": {**_SIZE, "ffn_dim": 1024, "max_position_embeddings": 512, "word_embed_proj_dim": 512},
    "bloom": {"hidden_size": 512, "n_layer": 4, "n_head": 8, "vocab_size": 32_000},
    "olmo2": _GATED,
    "gpt2": {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 50_257, "n_positions": 512},
}
BF16 = {"bf16": {"enabled": True}}
TP, PP = {"autotp_size": 2}, {"stages": 2}


def config_of(stage: int, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0, bf16": (1, config_of(0, **BF16)),
    "stage 1, fp32": (2, config_of(1)),
    "stage 3, bf16": (4, config_of(3, **BF16)),
    "stage 3, recomputed, tiled loss": (
        2,
        config_of(3, activation_checkpointing={}, tiled_loss=True, **BF16),
    ),
    "stage 2, tp 2, sequence": (4, config_of(2, tensor_parallel={**TP, "sequence_parallel": True}, **BF16)),
    "stage 1, pp 2": (4, config_of(1, 4, pipeline=PP, **BF16)),
    "stage 0, pp 2, tp 2, zb-h1": (
        4,
        config_of(0, 4, pipeline={**PP, "schedule": "zb-h1"}, tensor_parallel=TP, **BF16),
    ),
    "stage 1, pp 2, interleaved, recomputed": (
        2,
        config_of(1, 4, pipeline={**PP, "schedule": "interleaved"}, activation_checkpointing={}, **BF16),
    ),
    "stage 2, cp 2": (2, config_of(2, sequence_parallel_size=2, **BF16)),
    "stage 1, ep 2": (2, config_of(1, expert_parallel={"size": 2}, **BF16)),
}


class Row(NamedTuple):
    """A rank that was estimated, and rehearsed. Bytes at the peak."""

    way: str
    estimated: int
    found: int

    @property
    def off(self) -> float:
        return self.estimated / self.found - 1


def rows(model: PretrainedConfig) -> Iterator[Row]:
    """Yield one rank of each pipeline stage, in each way that the model can run."""
    for way, (world, json) in WAYS.items():
        config, estimator = load(json), Estimator(model)
        try:
            for rank in estimator.ranks(config, world):
                found = estimator.estimate(config, world, rank, SEQUENCE).peak
                played = dry_run(estimator.copy(), config, world=world, rank=rank, sequence=SEQUENCE).peak
                yield Row(way, found, played)
        except ConfigError as error:  # no experts to share, for example
            print(f"  {way}: {error.what}", file=sys.stderr)


def main(names: list[str]) -> None:
    lines = [
        "# Estimates of architectures",
        "",
        "Written by `python -m benchmarks.estimate_architectures`. Peaks in MiB of the rank that is estimated worst,",
        f"with 2 sequences of {SEQUENCE} tokens a microbatch. The rehearsal also counts 2 to 4 MiB of the optimizer's",
        "kernel on CPUs.",
        "",
        "| architecture | ranks | median off by | worst off by | way | estimated | rehearsed |",
        "|---|---:|---:|---:|---|---:|---:|",
    ]
    every: list[float] = []
    for name in names or ARCHITECTURES:
        found = list(rows(AutoConfig.for_model(name, **ARCHITECTURES[name])))
        every += [abs(row.off) for row in found]
        worst = max(found, key=lambda row: abs(row.off))
        middle = median(abs(row.off) for row in found)
        cells = [name, str(len(found)), f"{middle:.1%}", f"{worst.off:+.1%}", worst.way]
        cells += [f"{size / 2**20:.1f}" for size in (worst.estimated, worst.found)]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    near = sum(off <= 0.02 for off in every)
    lines += ["", f"{len(every)} estimates: the median is off by {median(every):.1%}, {near} by at most 2 %."]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
