"""Elements per second of a CPU optimizer step: ours, torch's and DeepSpeed's, beside what memory allows.

    python -m benchmarks.optimizer_step --threads 1 2 --out benchmarks/results/optimizer_step.jsonl

AdamW on fp32 master weights. "fp32": gradients are fp32. "bf16": gradients come in bf16, and the new weights are
written in bf16, too; torch and DeepSpeed cast in passes of their own. An element costs 28 bytes of traffic both ways.
"bound": plain in-place operations and copies that read and write those bytes and compute next to nothing.

They take turns in one process for each number of threads. Times at which the scheduler took a core from us are left
out."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from launcher.optim import one_pass

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BASELINES = {"fp32": "DeepSpeed fp32", "bf16": "DeepSpeed bf16"}
Steps = dict[str, Callable[[], object]]


def steps(numel: int) -> Steps:
    """What is timed; all work on the same tensors."""
    weights = nn.Parameter(torch.randn(numel) * 0.02)
    grad, low_grad = torch.randn(numel) * 0.01, (torch.randn(numel) * 0.01).bfloat16()
    low = weights.detach().bfloat16()
    weights.grad = grad
    ours: dict[str, Any] = {}
    optimizer = torch.optim.AdamW([weights], **OPTIONS, fused=True)
    group = optimizer.param_groups[0]
    fp32 = [one_pass.OnePass(weights.data, grad, ours)]
    bf16 = [one_pass.OnePass(weights.data, low_grad, ours, low)]
    one_pass.step(one_pass.ADAMW, group, fp32)
    optimizer.state[weights] = ours
    found: Steps = {
        "bound fp32": lambda: _move(weights.data, ours, grad, None),
        "bound bf16": lambda: _move(weights.data, ours, low_grad, low),
        "ours fp32": lambda: one_pass.step(one_pass.ADAMW, group, fp32),
        "ours bf16": lambda: one_pass.step(one_pass.ADAMW, group, bf16),
        "torch fp32": optimizer.step,
        "torch bf16": lambda: _three_passes(optimizer.step, weights.data, grad, low_grad, low),
    }
    theirs = _deepspeed(weights, ours)
    if theirs is not None:
        found["DeepSpeed fp32"] = theirs
        found["DeepSpeed bf16"] = lambda: _three_passes(theirs, weights.data, grad, low_grad, low)
    return found


def _three_passes(
    step: Callable[[], object], weights: Tensor, grad: Tensor, low_grad: Tensor, low: Tensor
) -> None:
    grad.copy_(low_grad)
    step()
    low.copy_(weights)


def _move(weights: Tensor, state: dict[str, Any], grad: Tensor, low: Tensor | None) -> None:
    """Read and write the bytes of a step."""
    if low is None:
        state["exp_avg"].add_(grad, alpha=1e-9)
    else:
        state["exp_avg"].mul_(1.0)
        low.view(torch.float32).copy_(grad.view(torch.float32))
    state["exp_avg_sq"].mul_(1.0)
    weights.mul_(1.0)


def _deepspeed(weights: nn.Parameter, state: dict[str, Any]) -> Callable[[], object] | None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    optimizer = DeepSpeedCPUAdam([weights], adamw_mode=True, **OPTIONS)
    optimizer.state[weights] = {**state, "step": 0}
    return optimizer.step  # type: ignore[no-any-return]


def timed(step: Callable[[], object]) -> tuple[float, bool]:
    """(seconds, whether no other process took a core meanwhile)."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
    step()
    took = time.perf_counter() - start
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before


@torch.no_grad()
def measure(numel: int, turns: int, limit: float) -> dict[str, list[float]]:
    """Seconds of each, in undisturbed turns: until there are `turns` of each, or `limit` seconds have passed."""
    what = steps(numel)
    for _ in range(2):
        for step in what.values():
            step()
    clean: dict[str, list[float]] = {name: [] for name in what}
    rest: dict[str, list[float]] = {name: [] for name in what}
    end = time.perf_counter() + limit
    while min(map(len, clean.values())) < turns and time.perf_counter() < end:
        for name, step in what.items():
            took, alone = timed(step)
            (clean if alone else rest)[name].append(took)
    # A machine that is never quiet: the fastest half of all turns.
    return {
        name: found if len(found) >= 3 else sorted(found + rest[name])[: max(3, len(rest[name]) // 2)]
        for name, found in clean.items()
    }


def table(threads: int, numel: int, found: dict[str, list[float]]) -> str:
    lines = [
        f"{threads} threads, {numel:,} elements",
        "",
        "| step | ms, median | smallest | turns | M elements/s | / DeepSpeed | / bound |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, seconds in found.items():
        kind = name.rsplit(" ", 1)[1]
        took, peer, bound = (
            median(found[n]) if n in found else None for n in (name, BASELINES[kind], f"bound {kind}")
        )
        assert took is not None and bound is not None
        against = "" if peer is None else f"{peer / took:.2f}"
        lines.append(
            f"| {name} | {took * 1e3:.1f} | {min(seconds) * 1e3:.1f} | {len(seconds)} | {numel / took / 1e6:.0f} "
            f"| {against} | {bound / took:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each number of threads")
    parser.add_argument("--out", type=Path, help="a line of JSON for each number of threads is added")
    args = parser.parse_args()
    if len(args.threads) > 1:  # OpenMP takes its number of threads once a process
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
            record = {"threads": args.threads[0], "numel": args.numel, "torch": torch.__version__, "s": found}
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
