"""Compare long sequences on two ranks with one rank, and with DeepSpeed's Ulysses (ALST), in one run:

    python -m benchmarks.long_sequences [--length 8192] [--steps 5] [--out benchmarks/results/long_sequences.json]

A step is one microbatch of one sequence: forward, backward, step. Each variant has its own process group. The variants
alternate step by step, so that other load on the machine affects all equally. torch's own `context_parallel` has no CPU
kernel.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.process_turns import in_turns, plain_step, run_rank

WAYS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one rank": (1, {}),
    "ulysses 2": (2, {"context_parallel": {"ulysses": 2}}),
    "ring 2, zigzag": (2, {"context_parallel": {"ring": 2}}),
    "ring 2, contiguous": (2, {"context_parallel": {"ring": 2, "layout": "contiguous"}}),
    "DeepSpeed's Ulysses 2": (2, None),
}
MODEL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--ways", nargs="*", default=list(WAYS), choices=WAYS, metavar="WAY", help="default: all"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=3, metavar=("WAY", "RANK", "DIRECTORY"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        sections = WAYS[flags.rank[0]][1]
        step_of = _deepspeeds(flags.length) if sections is None else _ours(flags.length, sections)
        run_rank(step_of, flags.steps, *flags.rank)
        return
    with tempfile.TemporaryDirectory() as name:
        ways, more = {way: WAYS[way][0] for way in flags.ways}, ["--length", str(flags.length)]
        more += ["--steps", str(flags.steps)]
        found = in_turns("benchmarks.long_sequences", ways, more, flags.steps, Path(name))
    one = found["one rank"]["seconds"]
    print(f"{'':26}{'s/step':>9}{'of one rank':>13}{'busiest/mean':>14}{'loss':>10}")
    for way, each in found.items():
        ratio = one / each["seconds"]
        print(f"{way:26}{each['seconds']:9.2f}{ratio:12.2f}x{each['busiest']:14.2f}{each['loss']:10.5f}")
    if flags.out:
        flags.out.write_text(json.dumps({"length": flags.length, "model": MODEL, "ways": found}, indent=2))


def _batch(length: int) -> Any:
    import torch

    return torch.randint(MODEL["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))


def _model(length: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL, max_position_embeddings=length))


def _ours(length: int, sections: dict[str, Any]) -> Callable[[], float]:
    import torch

    import launcher

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "tiled_loss": False,
        **sections,
    }
    engine: Any = launcher.initialize(model=_model(length), config=config, device=torch.device("cpu"))[0]
    return plain_step(engine, _batch(length))


def _deepspeeds(length: int) -> Callable[[], float]:
    """Follow DeepSpeed's tutorial on sequence parallelism."""
    import deepspeed
    import torch
    import torch.distributed.nn.functional as collectives
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    ranks, model = torch.distributed.get_world_size(), _model(length)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", ranks, micro_batch_size=1, seq_length=length, seq_length_is_variable=True
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "sequence_parallel_size": ranks,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine: Any = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, mpu=mpu
    )[0]
    mine = slice(engine.global_rank * length // ranks, (engine.global_rank + 1) * length // ranks)
    ids = _batch(length)
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)[:, mine].contiguous()
    places = torch.arange(length)[None, mine]

    def step() -> float:
        outputs = engine(input_ids=ids[:, mine], position_ids=places)
        loss = engine.module.loss_function(
            outputs.logits, None, vocab_size=MODEL["vocab_size"], shift_labels=labels
        )
        group, tokens = groups._get_sequence_parallel_group(), (labels != -100).sum()
        losses = collectives.all_gather(loss, group=group)
        every = collectives.all_gather(tokens, group=group)
        total = sum(each * number for each, number in zip(losses, every, strict=True)) / sum(every)
        engine.backward(total)
        engine.step()
        return float(total.detach())

    return step


if __name__ == "__main__":
    main()
