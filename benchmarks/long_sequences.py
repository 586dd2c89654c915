"""Long sequences on two ranks beside one, and beside DeepSpeed's Ulysses (ALST), in one run:

    python -m benchmarks.long_sequences [--length 8192] [--steps 5] [--out benchmarks/results/long_sequences.json]

One microbatch of one sequence: forward, backward, step. Each way is a process group of its own; ways take turns, step
by step, so that what else the machine does hits all alike. torch's own `context_parallel` has no kernel for CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tests.parity_deepspeed import operators

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
        run_rank(flags, *flags.rank)
        return
    with tempfile.TemporaryDirectory() as name:
        found = in_turns(flags, Path(name))
    one = found["one rank"]["seconds"]
    print(f"{'':26}{'s/step':>9}{'of one rank':>13}{'busiest/mean':>14}{'loss':>10}")
    for way, each in found.items():
        ratio = one / each["seconds"]
        print(f"{way:26}{each['seconds']:9.2f}{ratio:12.2f}x{each['busiest']:14.2f}{each['loss']:10.5f}")
    if flags.out:
        flags.out.write_text(json.dumps({"length": flags.length, "model": MODEL, "ways": found}, indent=2))


def in_turns(flags: argparse.Namespace, directory: Path) -> dict[str, dict[str, float]]:
    """Start all ranks of all ways, and give each way its turn: a file that its ranks wait for."""
    processes, ways = [], {way: WAYS[way] for way in flags.ways}
    for number, (way, (ranks, _)) in enumerate(ways.items()):
        for rank in range(ranks):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29610 + number),
                "OMP_NUM_THREADS": "1", **operators.environment(),
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks.long_sequences", "--length", str(flags.length)]
            command += ["--steps", str(flags.steps), "--rank", way, str(rank), str(directory)]
            processes.append(subprocess.Popen(command, env=environment))
    taken: dict[str, list[list[float]]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    for step in range(-1, flags.steps):  # the first one warms up
        for way, (ranks, _) in ways.items():
            (directory / f"go {way} {step}").touch()
            done = [directory / f"done {way} {step} {rank}" for rank in range(ranks)]
            while not all(path.exists() and path.read_text().endswith("\n") for path in done):
                if any(process.poll() not in (None, 0) for process in processes):
                    for process in processes:
                        process.kill()
                    sys.exit("a rank has failed; see above")
                time.sleep(0.01)
            told = [json.loads(path.read_text()) for path in done]
            losses[way] = told[0]["loss"]
            if step >= 0:
                taken[way].append([each["seconds"] for each in told] + [each["cpu"] for each in told])
    for process in processes:
        process.wait()
    return {
        way: {
            "seconds": median(max(row[: WAYS[way][0]]) for row in rows),
            "busiest": median(max(cpu := row[WAYS[way][0] :]) / (sum(cpu) / len(cpu)) for row in rows),
            "loss": losses[way],
        }
        for way, rows in taken.items()
    }


def run_rank(flags: argparse.Namespace, way: str, rank: str, directory: str) -> None:
    step_of = _deepspeeds(flags.length) if WAYS[way][1] is None else _ours(flags.length, WAYS[way][1] or {})
    for step in range(-1, flags.steps):
        while not Path(directory, f"go {way} {step}").exists():
            time.sleep(0.005)
        started, cpu = time.perf_counter(), time.process_time()
        loss = step_of()
        told = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - cpu, "loss": loss}
        Path(directory, f"done {way} {step} {rank}").write_text(json.dumps(told) + "\n")


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
    ids = _batch(length)

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _deepspeeds(length: int) -> Callable[[], float]:
    """As DeepSpeed's tutorial of sequence parallelism."""
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
