"""Compare the loss curve of a run on many ranks with that of one process, on the same sequences:

    python -m benchmarks.curves ds_configs/3d.json --num-gpus 8 --out docs/3d.png

The single process uses the same JSON without pipeline and tensor parallelism, and accumulates the batches of all ranks.
It also runs with twice as many sequences per microbatch, which shows the effect of rounding alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config import load
from launcher.monitor.figure import HEIGHT, blank, finish, save
from launcher.monitor.metrics import read_metrics
from launcher.monitor.plot import curve

FLOOR = 1e-8  # smallest difference drawn: below fp32 rounding


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--num-gpus", type=int, required=True)
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--model", default="default")
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        many = run(flags, flags.config, flags.num_gpus, directory / "many")
        for times in (1, 2):
            tree = one_process(flags.config, flags.num_gpus, times)
            (directory / f"{times}.json").write_text(json.dumps(tree), encoding="utf-8")
        one, again = (run(flags, str(directory / f"{n}.json"), 1, directory / f"one{n}") for n in (1, 2))
    off, rounding = (np.abs(other - one) / one for other in (many, again))
    for name, difference in ((flags.config, off), ("one process, larger microbatches", rounding)):
        print(
            f"{name}: largest relative difference {difference[: len(one) // 2].max():.2g} in the first half, "
            f"{difference.max():.2g} in all {len(one)} steps"
        )
    plot(one, many, off, rounding, f"{Path(flags.config).stem}.json on {flags.num_gpus} ranks", flags.out)


def one_process(path: str, ranks: int, times: int) -> dict[str, Any]:
    """Return the JSON of `path` for one rank: the same sequences per step, `times` as many per microbatch."""
    config = load(path)
    dp = config.dp_degree(ranks)
    tree = config.to_dict()
    for section in ("pipeline", "tensor_parallel", "context_parallel", "zero_optimization"):
        tree.pop(section)
    tree["sequence_parallel_size"] = 1
    tree["gradient_accumulation_steps"] = int(tree["gradient_accumulation_steps"]) * dp // times
    tree["train_micro_batch_size_per_gpu"] = int(tree["train_micro_batch_size_per_gpu"]) * times
    return tree


def run(flags: argparse.Namespace, config: str, ranks: int, output: Path) -> np.ndarray:
    """Return the loss of each step of a `pretrain` run."""
    command = [sys.executable, "-m", "launcher.cli.main", "--config", config, "--device", "cpu"]
    command += ["--num_gpus", str(ranks), "pretrain", "--model", flags.model, "--output-dir", str(output)]
    command += ["--max-steps", str(flags.max_steps), "--seq-length", str(flags.seq_length)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return curve(read_metrics(output / "metrics.jsonl"), "loss")[1]


def plot(
    one: np.ndarray, many: np.ndarray, off: np.ndarray, rounding: np.ndarray, name: str, out: Path
) -> None:
    """Plot both curves, and their difference below."""
    figure = blank(1.4 * HEIGHT)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = np.arange(1, len(one) + 1)
    above.plot(steps, one, color="#9db8d9", linewidth=5, label="one process")
    above.plot(steps, many, color="#c8501e", linewidth=1.5, linestyle="--", label=name)
    above.set_ylabel("loss (nats per token)")
    below.semilogy(
        steps, np.maximum(rounding, FLOOR), color="#9db8d9", label="one process, larger microbatches"
    )
    below.semilogy(steps, np.maximum(off, FLOOR), color="#c8501e", linestyle="--", label=name)
    below.set_ylabel("relative difference")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        finish(axes)
    save(figure, out)


if __name__ == "__main__":
    main()
