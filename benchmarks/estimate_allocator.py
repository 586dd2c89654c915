"""The estimate beside the memory of real processes, as the system and torch's allocator count it.

    python -m benchmarks.estimate_allocator [TEXT ...]

Writes `results/estimate_allocator.md`; TEXT: only cases with it. Each case is a run of its own, with processes that
compute: nothing of the launcher counts its bytes. A run on CPUs has one memory, so what is offloaded counts as well.
Nothing is timed; it takes some ten minutes.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import launcher
from benchmarks.estimate_architectures import ARCHITECTURES, BF16, PP, TP, config_of
from launcher.config import load
from launcher.engine.engine import Engine
from launcher.estimate.estimator import Estimator
from launcher.estimate.model_trace import microbatch

RESULTS = Path(__file__).with_name("results") / "estimate_allocator.md"
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed goes back
_CPU = {"device": "cpu"}


class Case(NamedTuple):
    """A run.

    Attributes:
        sequence: tokens of each of the two sequences of a microbatch.
    """

    architecture: str
    way: str
    world: int
    json: dict[str, Any]
    sequence: int = 256
    size: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)

    @property
    def model(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.architecture, **{**ARCHITECTURES[self.architecture], **self.size})

    @property
    def narrow(self) -> PretrainedConfig:
        """Return a model of the same kind, with few tokens in the vocabulary."""
        return AutoConfig.for_model(
            self.architecture, **{**ARCHITECTURES[self.architecture], **self.size, "vocab_size": 128}
        )

    @property
    def name(self) -> str:
        return f"{self.architecture}, {self.way}"


HEAD = """# Estimates beside the memory of processes

Written by `python -m benchmarks.estimate_allocator`. MiB of runs on CPUs, of the rank that is estimated worst. Peak:
by what the process grew (RSS) beyond one that had run the same way before; it holds what the libraries of products and
of messages keep as well: some 10 MiB, and far more for experts in bf16, whose products have another shape for each
number of tokens (where oneDNN may cache 8 of its kernels, and not 1,024, half as much). Step: what torch's allocator
gave in a step and did not have back at the peak, by its profiler.

| architecture | way | ranks | peak | measured | off by | step | measured | off by |
|---|---|---:|---:|---:|---:|---:|---:|---:|"""


def _zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **more}}


_OPTIMIZER_OFF = {"zero_optimization": {"stage": 2, "offload_optimizer": _CPU}}
_ALL_OFF = _zero(offload_optimizer=_CPU, offload_param=_CPU)
CASES = (
    Case("qwen3", "stage 0, fp32", 1, config_of(0)),
    Case(
        "qwen3",
        "stage 3, 150 k tokens in the vocabulary",
        2,
        config_of(3, **BF16),
        size={"vocab_size": 151_936},
    ),
    Case("gemma2", "stage 1, fp32", 2, config_of(1)),
    Case("gemma2", "stage 2, tp 2", 4, config_of(2, tensor_parallel=TP, **BF16)),
    Case("gemma3_text", "stage 3, bf16", 2, config_of(3, **BF16)),
    Case("gemma3_text", "stage 1, pp 2", 2, config_of(1, 4, pipeline=PP, **BF16)),
    Case("mixtral", "stage 1, ep 2", 2, config_of(1, expert_parallel={"size": 2}, **BF16)),
    Case("mixtral", "stage 3, fp32", 2, config_of(3)),
    Case("qwen3_moe", "stage 2, bf16", 2, config_of(2, **BF16)),
    Case(
        "qwen3_moe",
        "stage 1, ep 2, recomputed",
        2,
        config_of(1, expert_parallel={"size": 2}, activation_checkpointing={}),
    ),
    Case("gpt_neox", "stage 0, pp 2, zb-h1", 2, config_of(0, 4, pipeline={**PP, "schedule": "zb-h1"})),
    Case("gpt_neox", "stage 2, optimizer on the host", 2, config_of(2, **_OPTIMIZER_OFF, **BF16)),
    Case(
        "falcon",
        "stage 1, tp 2, sequence",
        2,
        config_of(1, tensor_parallel={**TP, "sequence_parallel": True}),
    ),
    Case("falcon", "stage 3, recomputed", 2, config_of(3, activation_checkpointing={}, **BF16)),
    Case("phi3", "stage 2, cp 2", 2, config_of(2, sequence_parallel_size=2, **BF16)),
    Case("phi3", "stage 3, all on the host", 2, config_of(3, **_ALL_OFF, **BF16)),
    Case("opt", "stage 1, pp 2, interleaved", 2, config_of(1, 4, pipeline={**PP, "schedule": "interleaved"})),
    Case("opt", "stage 0, bf16", 1, config_of(0, **BF16)),
    Case("bloom", "stage 2, fp32", 2, config_of(2)),
    Case("bloom", "stage 1, tp 2", 2, config_of(1, tensor_parallel=TP, **BF16)),
    Case(
        "olmo2",
        "stage 3, 2,048 tokens, recomputed",
        1,
        config_of(3, activation_checkpointing={}, **BF16),
        2048,
        {"max_position_embeddings": 2048},
    ),
    Case(
        "olmo2",
        "stage 1, 2,048 tokens, tiled loss, cp 2",
        2,
        config_of(1, sequence_parallel_size=2, tiled_loss=True, **BF16),
        2048,
        {"max_position_embeddings": 2048},
    ),
    Case("gpt2", "stage 0, pp 2, tp 2", 4, config_of(0, 4, pipeline=PP, tensor_parallel=TP)),
    Case("gpt2", "stage 2, 50 k tokens in the vocabulary", 2, config_of(2, **BF16)),
)


class Sizes(NamedTuple):
    """Bytes of a rank: at the peak of a step, and how much of that does not lie there between steps."""

    peak: float
    step: float


def measure(case: Case) -> Sizes:
    """Measure this rank: by what the process grew, and what torch's allocator gave in a step and did not take back.

    A run of the same kind of a narrower model goes before: what is imported and started on the way is there then.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trained(case, case.narrow)[0].destroy()
    gc.collect()
    before = status("VmRSS")
    engine, step = trained(case, case.model)
    peak = status("VmHWM") - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    engine.destroy()
    return Sizes(peak, most_allocated(found))


def trained(case: Case, model: PretrainedConfig) -> tuple[Engine, Callable[[], object]]:
    """Return an engine after three steps, and what takes one more. The peak of the system is that of the third."""
    engine = launcher.initialize(
        model=AutoModelForCausalLM.from_config(model), config=case.json, device=torch.device("cpu")
    )[0]
    sizes = engine.train_micro_batch_size_per_gpu(), case.sequence
    batches = [microbatch(engine.module, *sizes)] * engine.gradient_accumulation_steps()
    step = lambda: engine.train_batch(iter(batches))  # noqa: E731
    for _ in range(3):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
        step()
    return engine, step


def status(key: str) -> int:
    """Return bytes that the system says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def most_allocated(found: profile) -> int:
    """Return the most bytes that lay between all allocations and frees."""
    records: Any = found.profiler
    events = sorted(records.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def measured(case: Case) -> dict[int, Sizes]:
    """Return the bytes of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case.world)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.estimate_allocator", "--rank", str(CASES.index(case))],
            env={
                **os.environ,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                **MALLOC,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.world)
    ]
    outputs = [rank.communicate() for rank in ranks]
    for process, (_, error) in zip(ranks, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{case.name}: {error[-2000:]}")
    return {rank: Sizes(*json.loads(out.strip().splitlines()[-1])) for rank, (out, _) in enumerate(outputs)}


class Row(NamedTuple):
    """The rank of a case that was estimated worst."""

    case: Case
    estimated: Sizes
    measured: Sizes

    @property
    def off(self) -> Sizes:
        peak, step = (found / real - 1 for found, real in zip(self.estimated, self.measured, strict=True))
        return Sizes(peak, step)

    def __str__(self) -> str:
        cells = [self.case.architecture, self.case.way, str(self.case.world)]
        for estimated, measured, off in zip(self.estimated, self.measured, self.off, strict=True):
            cells += [f"{estimated / 2**20:.1f}", f"{measured / 2**20:.1f}", f"{off:+.1%}"]
        return f"| {' | '.join(cells)} |"


def row(case: Case) -> Row:
    """Run a case, and estimate it."""
    config, estimator, found = load(case.json), Estimator(case.model, on_host=True), measured(case)
    ranks = []
    for rank in estimator.ranks(config, case.world):
        estimate = estimator.estimate(config, case.world, rank, case.sequence)
        sizes = Sizes(estimate.peak + estimate.host, estimate.peak - estimate.between.total)
        ranks.append(Row(case, sizes, found[rank]))
    return max(ranks, key=lambda each: abs(each.off.peak))


def said(offs: list[float]) -> str:
    """Return how far estimates are off."""
    near = sum(abs(off) <= 0.02 for off in offs)
    middle = median(abs(off) for off in offs)
    return (
        f"the median is off by {middle:.1%}, the worst by {max(offs, key=abs):+.1%}; {near} are within 2 %."
    )


def page(cases: list[Case]) -> Iterator[str]:
    """Yield the lines of the page, as they are found."""
    yield HEAD
    rows = []
    for case in cases:
        rows.append(row(case))
        yield str(rows[-1])
    yield f"\n{len(rows)} runs. Peaks beside the memory of the process: {said([each.off.peak for each in rows])}"
    yield f"What a step takes beside torch's allocator: {said([each.off.step for each in rows])}"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--rank"]:
        print(json.dumps(measure(CASES[int(arguments[1])])))
        return
    cases = [case for case in CASES if all(text in case.name for text in arguments)]
    written = []
    for line in page(cases):
        print(line, flush=True)
        written.append(line)
    if not arguments:
        RESULTS.write_text("\n".join(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
