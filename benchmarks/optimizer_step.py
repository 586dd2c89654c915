"""Measure elements per second of a CPU optimizer step: ours, torch's and DeepSpeed's, relative to memory bandwidth.

    python -m benchmarks.optimizer_step --threads 1 2 --out benchmarks/results/optimizer_step.jsonl

AdamW on fp32 master weights. "fp32": gradients are fp32. "bf16": gradients are bf16, and the new weights are also
written in bf16; torch and DeepSpeed cast in separate passes. "compiled": with the JSON's `compile`. Each uses the
memory that its library allocates: ours huge pages, torch and DeepSpeed torch's allocator. "in our memory": DeepSpeed in
our memory.

An element costs 28 bytes of traffic in all of them. "bound": the time for these bytes at the bandwidth of the fastest
of several plain memory operations (`streams`), in our memory.

All alternate in one process per number of threads. Times are the faster quartile of the turns. Ratios are medians of
the ratios of each turn, so that a disturbance in a turn affects both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measure import machine_busy_s
from launcher.offload.tier import memory
from launcher.optim import one_pass

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BYTES = 28  # per element: weights and two moments read and written, 4 for gradient and parameter
Steps = dict[str, Callable[[], object]]


class Tensors(NamedTuple):
    """The tensors of a step, each [numel]."""

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    low_grad: Tensor
    low: Tensor


def tensors(make: Callable[[torch.dtype], Tensor]) -> Tensors:
    fp32 = [make(torch.float32) for _ in range(4)]
    made = Tensors(*fp32, *(make(torch.bfloat16) for _ in range(2)))
    made.weights.normal_(std=0.02)
    made.grad.normal_(std=0.01)
    made.low_grad.copy_(made.grad)
    made.low.copy_(made.weights)
    made.exp_avg.zero_()
    made.exp_avg_sq.zero_()
    return made


def steps(numel: int, mine: Tensors) -> Steps:
    """Return the steps to time, by name."""
    plain = tensors(lambda dtype: torch.empty(numel, dtype=dtype))
    found = {**ours(mine), **theirs(plain, " fp32", " bf16")}
    return {**found, **theirs(mine, " in our memory fp32", " in our memory bf16", only="DeepSpeed")}


def ours(on: Tensors) -> Steps:
    state: dict[str, Any] = {"exp_avg": on.exp_avg, "exp_avg_sq": on.exp_avg_sq}
    group = torch.optim.AdamW([nn.Parameter(torch.empty(0))], **OPTIONS, fused=True).param_groups[0]
    fp32 = [one_pass.FusedSlice(on.weights, on.grad, state)]
    bf16 = [one_pass.FusedSlice(on.weights, on.low_grad, state, on.low)]
    return {
        "ours fp32": lambda: one_pass.step(one_pass.ADAMW, group, fp32),
        "ours bf16": lambda: one_pass.step(one_pass.ADAMW, group, bf16),
        "ours, compiled bf16": lambda: one_pass.step(one_pass.ADAMW, group, bf16, compiles=True),
    }


def theirs(on: Tensors, fp32: str, bf16: str, *, only: str = "") -> Steps:
    """Return the steps of torch and DeepSpeed."""
    found: Steps = {}
    for name, make in {"torch": _torch, "DeepSpeed": _deepspeed}.items():
        if only in name and (step := make(on)) is not None:
            found[name + fp32] = step
            found[name + bf16] = partial(_three_passes, step, on)
    return found


def _three_passes(step: Callable[[], object], on: Tensors) -> None:
    on.grad.copy_(on.low_grad)
    step()
    on.low.copy_(on.weights)


def _torch(on: Tensors) -> Callable[[], object]:
    weights = nn.Parameter(on.weights)
    weights.grad = on.grad
    optimizer = torch.optim.AdamW([weights], **OPTIONS, fused=True)
    optimizer.state[weights] = {
        "step": torch.zeros(()),
        "exp_avg": on.exp_avg,
        "exp_avg_sq": on.exp_avg_sq,
    }
    return optimizer.step


def _deepspeed(on: Tensors) -> Callable[[], object] | None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    weights = nn.Parameter(on.weights)
    weights.grad = on.grad
    optimizer = DeepSpeedCPUAdam([weights], adamw_mode=True, **OPTIONS)
    optimizer.state[weights] = {"step": 0, "exp_avg": on.exp_avg, "exp_avg_sq": on.exp_avg_sq}
    return optimizer.step  # type: ignore[no-any-return]


def streams(on: Tensors) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return operations with almost no compute: name -> (bytes per element read and written, the call)."""
    a, b, c = on.exp_avg, on.exp_avg_sq, on.weights
    sgd: dict[str, Any] = {
        "weight_decay": 0.0,
        "momentum": 1.0,
        "lr": 0.0,
        "dampening": 1.0,
        "nesterov": False,
    }
    rest: dict[str, Any] = {"maximize": False, "is_first_step": False, "grad_scale": None, "found_inf": None}
    return {
        "SGD with momentum": (20, lambda: torch._fused_sgd_([c], [on.grad], [a], **sgd, **rest)),
        "copy": (8, lambda: a.copy_(b)),
        "scale in place": (8, lambda: a.mul_(1.0)),
        "add in place": (12, lambda: a.add_(b, alpha=0.0)),
        "triad": (12, lambda: torch.add(a, b, alpha=0.0, out=c)),
    }


@torch.no_grad()
def measure(numel: int, turns: int, limit: float) -> dict[str, Any]:
    """Return the seconds of each step, one per turn, for `turns` turns or `limit` seconds, and the load of other
    processes.
    """
    mine = tensors(lambda dtype: memory(numel, dtype, torch.device("cpu")))
    what = steps(numel, mine)
    plain = streams(mine)
    every = {**what, **{name: call for name, (_, call) in plain.items()}}
    for call in list(every.values()) * 2:
        call()
    found: dict[str, list[float]] = {name: [] for name in every}
    busy, own, start = machine_busy_s(), time.process_time(), time.perf_counter()
    while len(found["ours fp32"]) < turns and time.perf_counter() < start + limit:
        for name, call in every.items():
            before = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - before)
    wall = time.perf_counter() - start
    others = (machine_busy_s() - busy - (time.process_time() - own)) / wall / (os.cpu_count() or 1)
    speeds = {name: sorted(moved * numel / s for s in found[name]) for name, (moved, _) in plain.items()}
    # bytes/s of the faster quartile, for the fastest operation
    best = max(speeds, key=lambda name: speeds[name][-len(speeds[name]) // 4])
    found["bound"] = [s * BYTES / plain[best][0] for s in found[best]]
    return {"s": found, "others": round(others, 3), "bound": best}


def quick(seconds: list[float]) -> float:
    """Return the faster quartile."""
    return sorted(seconds)[len(seconds) // 4]


def table(threads: int, numel: int, measured: dict[str, Any]) -> str:
    found: dict[str, list[float]] = measured["s"]
    lines = [
        f"{threads} threads, {numel:,} elements, {len(found['bound'])} turns; bound: {measured['bound']}; "
        f"others used {measured['others']:.0%} of the machine",
        "",
        "| step | ms | smallest | M elements/s | / DeepSpeed | / DeepSpeed in our memory | / bound |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in (name for name in found if name.endswith((" fp32", " bf16")) or name == "bound"):
        kind = name.rsplit(" ", 1)[-1]
        peers = (f"DeepSpeed {kind}", f"DeepSpeed in our memory {kind}", "bound")
        against = [f"{ratio(found[name], found[peer]):.2f}" if peer in found else "" for peer in peers]
        took = quick(found[name])
        cells = [f"{took * 1e3:.1f}", f"{min(found[name]) * 1e3:.1f}", f"{numel / took / 1e6:.0f}", *against]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratio(mine: list[float], theirs: list[float]) -> float:
    """Return the median over turns of their time divided by ours."""
    return median(other / own for own, other in zip(mine, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each number of threads")
    parser.add_argument("--out", type=Path, help="a line of JSON for each number of threads is added")
    args = parser.parse_args()
    if len(args.threads) > 1:  # OpenMP sets its number of threads once per process
        options = [
            f"--{key}={getattr(args, key)}"
            for key in ("numel", "turns", "limit", "out")
            if getattr(args, key)
        ]
        for threads in args.threads:
            command = [sys.executable, "-m", "benchmarks.optimizer_step", "--threads", str(threads), *options]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        return
    torch.set_num_threads(args.threads[0])
    found = measure(args.numel, args.turns, args.limit)
    print(table(args.threads[0], args.numel, found), flush=True)
    if args.out:
        with args.out.open("a") as file:
            record = {"threads": args.threads[0], "numel": args.numel, "torch": torch.__version__, **found}
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
