"""Measure training memory by model size, with everything on NVMe: it depends on the block size, not on the model size.

    python -m benchmarks.offload_memory --layers 8 16 24 40 --limit 1200 --out docs/offload_memory.png

The models are Llamas with more and more equal blocks. Each runs in its own process and is initialized directly on disk.
Prints a table, plots it, and writes the records to benchmarks/results/. With `--limit` the largest model runs again
under RLIMIT_DATA: the system denies the process more MiB of private memory than that, touched or not.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import MB, peak_rss_mb, rss_mb
from benchmarks.sweep import ROOT, append, describe_session
from benchmarks.workload import ADAM, SIZES, Text, config_of, lm_loss
from launcher.monitor.figure import blank, finish, save

BLOCK = SIZES["medium"]
SEQ, STEPS = 128, 3
STATE = 16  # bytes per parameter: weight, gradient and two moments in fp32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 24, 40], help="blocks of each model")
    parser.add_argument("--limit", type=int, default=0, help="MiB for the largest model, once more")
    parser.add_argument("--nvme-path", default="/tmp", help="a directory on the disk")
    parser.add_argument("--out", type=Path, help="the picture")
    parser.add_argument("--one", type=int, help="train one model of so many blocks in this process")
    flags = parser.parse_args()
    if flags.one:
        print(json.dumps(train(flags.one, flags.limit, flags.nvme_path)))
        return
    file = ROOT / "benchmarks" / "results" / f"offload_memory-{datetime.now():%Y%m%d-%H%M}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    append(file, {"session": describe_session()})
    jobs = [(layers, 0) for layers in flags.layers]
    records = []
    for layers, limit in jobs + ([(max(flags.layers), flags.limit)] if flags.limit else []):
        records.append(child(layers, limit, flags.nvme_path))
        append(file, records[-1])
        print(line(records[-1]), flush=True)
    if flags.out:
        plot(records[: len(jobs)], flags.out)
    print(f"records: {file}")


def child(layers: int, limit: int, directory: str) -> dict[str, Any]:
    """Run `train` in its own process."""
    command = [sys.executable, "-m", "benchmarks.offload_memory", "--one", str(layers)]
    command += ["--limit", str(limit), "--nvme-path", directory]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    record: dict[str, Any] = json.loads(output.splitlines()[-1])
    return record


def train(layers: int, limit: int, directory: str) -> dict[str, Any]:
    """Run a few steps, and return their cost."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit * MB, limit * MB))
    import torch
    from transformers import LlamaForCausalLM

    import launcher

    torch.set_num_threads(1)
    size = replace(BLOCK, layers=layers)
    base = rss_mb()
    with launcher.zero.Init():
        model = LlamaForCausalLM(config_of(size))
    model.train()
    engine = launcher.initialize(model=model, config=config(directory))[0]
    made = peak_rss_mb()
    text, losses, seconds = Text(SEQ), [], []
    for step in range(STEPS):
        start = time.perf_counter()
        ids = text.sequence(step)[None]
        loss = lm_loss(engine(input_ids=ids).logits, ids)
        engine.backward(loss)
        engine.step()
        losses.append(round(loss.item(), 4))
        seconds.append(time.perf_counter() - start)
    record = {
        "layers": layers,
        "parameters": size.parameters,
        "state_mb": round(size.parameters * STATE / MB),
        "limit_mb": limit,
        "base_rss_mb": round(base),
        "setup_peak_mb": round(made),
        "peak_rss_mb": round(peak_rss_mb()),
        "step_s": round(statistics.median(seconds), 2),
        "losses": losses,
    }
    engine.destroy()
    return record


def config(directory: str) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": ADAM | {"betas": list(ADAM["betas"]), "lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place | {"max_in_cpu": 0},
            "offload_optimizer": place,
        },
        "activation_checkpointing": {},  # otherwise saved activations would grow with the model
        "steps_per_print": 10**9,
    }


def line(record: dict[str, Any]) -> str:
    """Return a record as a line of text."""
    under = f" under a limit of {record['limit_mb']} MiB" if record["limit_mb"] else ""
    return (
        f"{record['layers']:4d} blocks {record['parameters'] / 1e6:7.1f} M parameters, state "
        f"{record['state_mb']:6d} MiB: peak {record['peak_rss_mb']} MiB ({record['setup_peak_mb']} while it was made), "
        f"{record['step_s']:.1f} s a step, losses {record['losses']}{under}"
    )


def plot(records: list[dict[str, Any]], out: Path) -> None:
    """Plot peak memory and model state by parameters."""
    figure = blank()
    axes = figure.add_subplot()
    millions = [record["parameters"] / 1e6 for record in records]
    for key, colour, label in (
        ("state_mb", "#9db8d9", f"model state: {STATE} bytes a parameter"),
        ("peak_rss_mb", "#c8501e", "peak memory of the process"),
        ("base_rss_mb", "#888888", "Python, torch and transformers alone"),
    ):
        axes.plot(millions, [record[key] for record in records], "o-", color=colour, label=label)
    axes.set_title("Training with everything on NVMe, one process")
    axes.set_xlabel("million parameters")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    finish(axes)
    save(figure, out)


if __name__ == "__main__":
    main()
