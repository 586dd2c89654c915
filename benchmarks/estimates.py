"""What the estimator says beside papers, runs and other estimators.

    python -m benchmarks.estimates --out docs/estimates.md

Two ranks with one thread each measure the peaks. The peers are DeepSpeed's functions and `accelerate estimate-memory`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config

import launcher
from launcher.comm import Mesh
from launcher.config import load
from launcher.engine.assemble import resolve
from launcher.estimate.dry_run import rehearse
from launcher.estimate.estimator import Estimator
from launcher.estimate.live import LiveBytesMode
from launcher.estimate.memory_trace import TraceSegment
from launcher.estimate.model_trace import ModelTraces
from launcher.estimate.offloaded_bytes import on
from launcher.estimate.rank_part import RankParts
from launcher.estimate.simulated import META, SimulatedRank
from launcher.estimate.states import StateBytes
from launcher.models.build import build_on_meta, load_config
from launcher.pipeline.schedules import schedule
from launcher.pipeline.timeline.bubble import bubble_time
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate

RANKS = (1, 4, 16, 64, 256, 1024)
WORLD, SEQUENCE, GB = 2, 64, 10**9
BF16 = {"bf16": {"enabled": True}}
TP = {"tensor_parallel": {"autotp_size": 2}}
AGAIN: dict[str, Any] = {"activation_checkpointing": {}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 0, bf16": (0, BF16),
    "stage 1, bf16": (1, BF16),
    "stage 2, bf16": (2, BF16),
    "stage 3, bf16": (3, BF16),
    "stage 2, recomputed": (2, AGAIN),
    "stage 1, two tensor-parallel ranks": (1, TP),
    "stage 1, two stages, 1f1b": (1, {"pipeline": {"stages": 2}}),
    "stage 0, two stages, zb-h1": (0, {"pipeline": {"stages": 2, "schedule": "zb-h1"}}),
}
RESULTS = Path(__file__).with_name("results") / "estimates.json"
SHAPES = ((1024, 16, 1), (1024, 16, 4), (2048, 16, 1), (1024, 8, 2))  # hidden, heads, tp
TOKENS, SEQUENCES = 512, 2
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2))
HEAD = """# Estimates

`launch memory-estimate` beside papers, runs and other estimators. Written by `python -m benchmarks.estimates`;
`tests/estimate/test_papers.py` keeps the tables true.
"""


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    """A JSON with AdamW."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }


# ---- papers ---------------------------------------------------------------------------------------


class Paper(nn.Module):
    """7.5 B parameters."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(nn.Linear(10_000, 10_000, bias=False) for _ in range(75))


def zero_states(stage: int, ranks: int) -> float:
    """GB of model states of a rank, as in figure 1 of the ZeRO paper (arXiv 1910.02054)."""
    model = Paper()
    mesh = Mesh.planned(META, ranks, 0, dp=ranks)
    config = resolve(load(config_of(stage, **BF16)), mesh, model, {})
    rank = SimulatedRank(RankParts(model).of(config, mesh, SEQUENCE), config, mesh, StateBytes(config, model))
    for gradient in rank.gradients:
        assert gradient.owned is not None  # asked for, it is there
    return sum(on(META, held) for held in rank.kept()) / GB


def as_printed(gigabytes: float) -> str:
    """As in the paper."""
    return f"{gigabytes:.3g}" if gigabytes >= 1 else f"{gigabytes:.2f}"


def activations(hidden: int, heads: int, tp: int, kind: str) -> tuple[float, float]:
    """Bytes of activations that a block keeps: (by Korthikanti et al., arXiv 2205.05198, traced).

    With sequence parallelism their code gathers the inputs of attention and MLP again in the backward; ours keeps them,
    which is 4 s b h (1 - 1/t) more, and in the formula here.

    Args:
        kind: "", "sequence" or "recomputed".
    """
    shape = GPT2Config(
        n_embd=hidden,
        n_head=heads,
        n_layer=4,
        n_positions=TOKENS,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=0,
        activation_function="gelu",
        attn_implementation="eager",
    )
    more: dict[str, Any] = AGAIN if kind == "recomputed" else {}
    split = {"tensor_parallel": {"autotp_size": tp, "sequence_parallel": kind == "sequence"}}
    config = load(config_of(0, **BF16, **split, **more)).resolve(dp_degree=1)
    traced = ModelTraces(build_on_meta(shape)).of(config, TOKENS, recomputed=kind == "recomputed")
    kept = sum(item.change for item in traced.of(1).forward if isinstance(item, TraceSegment))
    each, scores = TOKENS * SEQUENCES * hidden, 5 * heads * TOKENS / hidden
    formula = {
        "": each * (10 + 24 / tp + scores / tp),
        "sequence": each / tp * (34 + scores) + 4 * each * (1 - 1 / tp),
        "recomputed": each * 2,
    }
    return formula[kind], kept


def bubbles(stages: int, microbatches: int) -> Iterator[tuple[str, float, float]]:
    """(schedule, idle part of the ideal time by the closed form, simulated)."""
    for name, chunks in SCHEDULES:
        costs = MicrobatchCosts.even(stages * chunks, 1 / chunks, 1 / chunks, 1 / chunks)
        found = simulate(schedule(name, stages, microbatches, chunks), costs)
        closed = bubble_time(name, stages, microbatches, chunks)
        assert closed is not None
        yield name, closed / (3 * microbatches), found.bubble_over_ideal


# ---- runs -----------------------------------------------------------------------------------------


def measure(out: Path) -> None:
    """As a rank of two: the peaks of all cases, written by each rank."""
    torch.set_num_threads(1)
    peaks = {}
    for name, (stage, more) in CASES.items():
        made = launcher.initialize
        model = build_on_meta(load_config("default"))
        found = rehearse(
            lambda live, model=model, stage=stage, more=more, made=made: made(  # type: ignore[misc]
                model=model, config=config_of(stage, **more), device=torch.device("cpu")
            )[0],
            SEQUENCE,
            LiveBytesMode,
        )
        peaks[name] = found.peak
        if os.environ["RANK"] == "0":
            print(name, found.peak, flush=True)
    rank = os.environ["RANK"]
    (out / f"{rank}.json").write_text(json.dumps(peaks))


def measured() -> list[dict[str, int]]:
    """Peaks of each rank by case."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(WORLD),
            "--standalone",
        ]
        command += ["-m", "benchmarks.estimates", "--measure", directory]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(WORLD)]


def others(stage: int, parameters: int, largest: int, *, bf16: bool) -> tuple[int | None, int]:
    """Bytes by (DeepSpeed, accelerate) of data-parallel ranks; None: it has no function for
    that."""
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    usage = estimate_training_usage(4 * parameters, "bfloat16" if bf16 else "float32")
    theirs = max(usage.values())
    if not bf16:
        return None, theirs
    if stage == 2:
        return estimate_zero2_model_states_mem_needs(parameters, WORLD, 1, cpu_offload=False)[1], theirs
    if stage == 3:
        needs = estimate_zero3_model_states_mem_needs(
            parameters, largest, WORLD, 1, cpu_offload=False, cpu_offload_params=False
        )
        return needs[1], theirs
    return None, theirs


# ---- the page -------------------------------------------------------------------------------------


def page(real: list[dict[str, int]]) -> Iterator[str]:
    """Its parts.

    Args:
        real: what `measured` gives.
    """
    yield HEAD
    yield (
        "\n## Model states\n\nGB a rank for 7.5 B parameters in 16 bits with Adam: the ZeRO paper (arXiv 1910.02054, "
        "figure 1 and table 1), from flat\nbuffers that the engine would make.\n\n| ranks | stage 0 | stage 1 | "
        "stage 2 | stage 3 |\n|---:|---:|---:|---:|---:|\n"
    )
    for ranks in RANKS:
        cells = (as_printed(zero_states(stage, ranks)) for stage in range(4))
        yield f"| {ranks} | {' | '.join(cells)} |\n"
    yield (
        "\n## Activations of a block\n\nMB that a GPT block with dropout keeps for its backward, in bf16, "
        f"{SEQUENCES} sequences of {TOKENS} tokens, attention without a fused kernel:\nthe formulae of Korthikanti et "
        "al. (arXiv 2205.05198) and the trace. With sequence parallelism their code gathers the\ninputs of attention "
        "and MLP again in the backward; ours keeps them: 4 s b h (1 - 1/t) bytes are added to their formula.\n\n"
        "| hidden, heads | tensor parallel | | formula | traced | off by |\n|---|---:|---|---:|---:|---:|\n"
    )
    for (hidden, heads, tp), kind in product(SHAPES, ("", "sequence", "recomputed")):
        if kind != "sequence" or tp > 1:
            formula, traced = activations(hidden, heads, tp, kind)
            numbers = f"{formula / 1e6:.2f} | {traced / 1e6:.2f} | {traced / formula - 1:+.1%}"
            yield f"| {hidden}, {heads} | {tp} | {kind} | {numbers} |\n"
    yield (
        "\n## Bubbles\n\nIdle over ideal time, forward, input gradient and weight gradient equally long: closed form "
        "and simulation.\n\n| schedule | 4 stages, 8 microbatches | | 8 stages, 32 microbatches | |\n"
        "|---|---:|---:|---:|---:|\n"
    )
    for first, second in zip(bubbles(4, 8), bubbles(8, 32), strict=True):
        yield f"| {first[0]} | {first[1]:.3f} | {first[2]:.3f} | {second[1]:.3f} | {second[2]:.3f} |\n"
    yield from _peaks(real)


def _peaks(real: list[dict[str, int]]) -> Iterator[str]:
    estimator = Estimator(load_config("default"))
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in estimator.model.modules())
    yield (
        f"\n## Peaks\n\nMB at the peak of a step, {estimator.parameters / 1e6:.1f} M parameters, {WORLD} ranks, 2 x "
        f"{SEQUENCE} tokens a microbatch: bytes of tensors that were alive in a\nrun on CPUs, and what is predicted "
        "without one. The other two count model states only, DeepSpeed's for 16-bit training of\nstages 2 and 3, "
        "`accelerate estimate-memory` of one device; neither knows tensor parallelism or stages.\n\n| run | measured | "
        "predicted | off by | DeepSpeed | off by | accelerate | off by |\n|---|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    for name, (stage, more) in CASES.items():
        config = load(config_of(stage, **more))
        found = estimator.run(config, WORLD, SEQUENCE)
        peak = max(one[name] for one in real)
        predicted = max(one.peak for one in found)
        alone = "pipeline" not in more and "tensor_parallel" not in more
        them = others(stage, estimator.parameters, largest, bf16="bf16" in more) if alone else (None, None)
        cells = [f"{peak / 1e6:.1f}"]
        for value in (predicted, *them):
            cells += ["", ""] if value is None else [f"{value / 1e6:.1f}", f"{value / peak - 1:+.1%}"]
        yield f"| {name} | {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page")
    parser.add_argument("--again", action="store_true", help=f"measure, though there is {RESULTS.name}")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    if args.again or not RESULTS.exists():
        RESULTS.write_text(json.dumps(measured(), indent=1) + "\n")
    text = "".join(page(json.loads(RESULTS.read_text())))
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
