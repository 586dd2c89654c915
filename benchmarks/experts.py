"""Compare expert parallelism on two ranks with ZeRO 3, DeepSpeed's ZeRO 3 and a dense model of equal work, in one run:

    python -m benchmarks.experts [--steps 5] [--length 256] [--out benchmarks/results/experts.json]

The model is a Qwen3-MoE with 64 experts, top-8 routing and 207 M parameters in fp32. Each rank runs one microbatch:
forward, backward, step. The dense model's MLPs are as wide as 8 experts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.process_turns import in_turns, plain_step, run_rank

WAYS: dict[str, dict[str, Any] | None] = {
    "experts over 2, ZeRO 1": {"expert_parallel": {"size": 2}, "zero_optimization": {"stage": 1}},
    "same, dispatch by tokens": {
        "expert_parallel": {"size": 2, "dispatch": "tokens"},
        "zero_optimization": {"stage": 1},
    },
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "dense, ZeRO 1": {"zero_optimization": {"stage": 1}},
    "DeepSpeed's ZeRO 3": None,
}
ROWS = 2
EXPERTS, ACTIVE, WIDTH = 64, 8, 256
MODEL = {
    "vocab_size": 4096, "hidden_size": 512, "moe_intermediate_size": WIDTH, "intermediate_size": ACTIVE * WIDTH,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts": EXPERTS, "num_experts_per_tok": ACTIVE, "norm_topk_prob": True, "use_cache": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of each of the two sequences of a rank"
    )
    parser.add_argument(
        "--ways", nargs="*", default=list(WAYS), choices=WAYS, metavar="WAY", help="default: all"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=3, metavar=("WAY", "RANK", "DIRECTORY"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        way, rank, _ = flags.rank
        sections = WAYS[way]
        make = _deepspeeds if sections is None else lambda model: _ours(model, sections)
        run_rank(_step(make(_model(way)), int(rank), flags.length), flags.steps, *flags.rank)
        return
    with tempfile.TemporaryDirectory() as name:
        ways, more = (
            dict.fromkeys(flags.ways, 2),
            ["--steps", str(flags.steps), "--length", str(flags.length)],
        )
        found = in_turns("benchmarks.experts", ways, more, flags.steps, Path(name))
    first = found[flags.ways[0]]["seconds"]
    print(f"{'':26}{'s/step':>9}{'of the first':>14}{'peak, MiB':>11}{'loss':>10}")
    for way, each in found.items():
        peak = each["peak_bytes"] / 2**20
        print(
            f"{way:26}{each['seconds']:9.2f}{each['seconds'] / first:13.2f}x{peak:11.0f}{each['loss']:10.5f}"
        )
    if flags.out:
        flags.out.write_text(
            json.dumps({"rows": ROWS, "length": flags.length, "model": MODEL, "ways": found}, indent=2)
        )


def _model(way: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if way.startswith("dense"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL))
    config = AutoConfig.for_model("qwen3_moe", **MODEL)
    return AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")


def _config() -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


def _ours(model: Any, sections: dict[str, Any]) -> Any:
    import torch

    import launcher

    return launcher.initialize(model=model, config={**_config(), **sections}, device=torch.device("cpu"))[0]


def _deepspeeds(model: Any) -> Any:
    """Mark the expert blocks as leaf modules, as DeepSpeed's documentation requires."""
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    set_z3_leaf_modules(model, [Qwen3MoeSparseMoeBlock])
    config = {**_config(), "zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": False}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _step(engine: Any, rank: int, length: int) -> Callable[[], float]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    return plain_step(engine, torch.randint(MODEL["vocab_size"], (ROWS, length), generator=generator))


if __name__ == "__main__":
    main()
