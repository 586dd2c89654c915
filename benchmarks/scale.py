"""How what every run does before its first step grows with the number of ranks, without having them.

python -m benchmarks.scale                   # writes docs/scale.md and docs/scale.png: two minutes

For 64 to 16,384 ranks: the hostfile is read and divided; the real engine starts, and takes three steps, as one rank of
a mesh of that size, under torch's fake process group and with tensors without memory; and a checkpoint is planned, as
each rank plans its part and as rank 0 merges the parts. Each number of ranks in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import peak_rss_mb, reset_peak
from benchmarks.sweep import ROOT, describe_session

RANKS = (64, 256, 1024, 4096, 16384)
PLANNED = 1024  # ranks up to which all plans are made and merged
SEQUENCE = 4096
MODELS: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "405b": {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248},
}  # fmt: skip
PAGE = ROOT / "docs" / "scale.md"
ABOUT = """\
# How it grows with the number of ranks

Made by `python -m benchmarks.scale` ({made}): Llama {model}, ZeRO-3, bf16, one sequence of 4,096 tokens a rank. One
process plays one rank of a mesh of each size, under torch's fake process group and with tensors without memory. It runs
the real code: the hostfile is read and a host left out, the engine starts and takes three steps, and a checkpoint of
parameters and Adam's moments is planned, on each rank and, merged, on rank 0.

![Seconds before the first step against the number of ranks](scale.png)

{table}

What one rank does hardly depends on how many there are: what it holds falls to the buffers of the blocks that are
gathered at a time. The hostfile, and the plan that rank 0 merges for `torch.distributed.checkpoint`, are proportional
to the ranks: some 4 ms and 0.5 MB a rank, so about a minute and 8 GB for 16,384 of them. Nothing is quadratic.
"""
COLUMNS = {
    "hostfile_s": "hostfile, s",
    "start_s": "start and three steps of one rank, s",
    "start_rss_mb": "RSS of that, MB",
    "held_mb": "held by a rank, MB",
    "plan_s": "plan of one rank, ms",
    "merge_s": "merging all plans, s",
    "plan_rss_mb": "RSS of that, MB",
}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, what it gives)."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def model_config(name: str) -> Any:
    from transformers import LlamaConfig

    fields: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, **MODELS[name]}
    return LlamaConfig(**fields)


def ds_config() -> Any:
    from launcher.config.root import load

    return load({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 1000},
    })  # fmt: skip


def hostfile(ranks: int) -> float:
    """Seconds to read the hosts of so many ranks, eight each, and to leave one out."""
    from launcher.cluster.hostfile import parse_hostfile
    from launcher.cluster.selection import select

    text = "".join(f"node{i:05d} slots=8\n" for i in range(ranks // 8))
    times = [timed(lambda: select(parse_hostfile(text, "hosts"), exclude="node00003"))[0] for _ in range(3)]
    return min(times)


def start(model: str, ranks: int) -> dict[str, float]:
    """One rank's start and three steps."""
    from launcher.estimate.dry_run import dry_run
    from launcher.models.build import build_on_meta

    built = build_on_meta(model_config(model))
    reset_peak()
    seconds, found = timed(lambda: dry_run(built, ds_config(), world=ranks, sequence=SEQUENCE))
    return {"start_s": seconds, "start_rss_mb": peak_rss_mb(), "held_mb": found.between.total / 2**20}


def plans(model: str, ranks: int) -> dict[str, float]:
    """The plan of a checkpoint of parameters and Adam's two moments, at stage 3."""
    import torch
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.planner import SavePlan

    from launcher.checkpoint.slices import FlatSlice
    from launcher.estimate.estimator import Estimator
    from launcher.estimate.simulated import SimulatedRank

    estimator, config = Estimator(model_config(model)), ds_config()
    mesh, resolved, portion = estimator._laid_out(config, ranks, 0, SEQUENCE)
    paper = SimulatedRank(portion, resolved, mesh, estimator._states_of(resolved))
    none = torch.empty(0)

    def plan(rank: int) -> SavePlan:
        items = []
        for flat in paper.flats:
            size = flat.numel // ranks
            for slot, first, last in flat.overlaps(slice(rank * size, (rank + 1) * size)):
                for kind in ("parameters", "exp_avg", "exp_avg_sq"):
                    place = lambda: none, slot.split, first, last
                    piece = FlatSlice.lazily(*place, dtype=torch.float32, device=none.device)
                    items += piece.__create_write_items__(f"{kind}/{slot.name}", piece)
        return SavePlan(items)

    seconds, _ = timed(lambda: [plan(rank) for rank in range(0, ranks, ranks // 16)])
    found = {"plan_s": seconds / 16}
    if ranks <= PLANNED:
        all_plans = [plan(rank) for rank in range(ranks)]
        reset_peak()
        found["merge_s"] = timed(lambda: create_default_global_save_plan(all_plans))[0]
        found["plan_rss_mb"] = peak_rss_mb()
    return found


def measure(model: str, ranks: int) -> dict[str, float]:
    """All of it, for one number of ranks."""
    return {"ranks": ranks, "hostfile_s": hostfile(ranks), **start(model, ranks), **plans(model, ranks)}


def table(rows: list[dict[str, float]]) -> str:
    """As Markdown."""
    lines = ["| ranks | " + " | ".join(COLUMNS.values()) + " |", "| ---: " * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        scaled = {key: value * (1000 if key == "plan_s" else 1) for key, value in row.items()}
        cells = [_figure(scaled[key]) if key in scaled else "" for key in COLUMNS]
        lines.append(f"| {row['ranks']:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def draw(rows: list[dict[str, float]], model: str, file: Path) -> None:
    """Both axes logarithmic: what is proportional to the ranks is as steep as the grey line."""
    from launcher.monitor.figure import blank, finish, save

    figure = blank()
    axes = figure.add_subplot()
    for key in ("hostfile_s", "start_s", "plan_s", "merge_s"):
        known = [row for row in rows if key in row]
        axes.loglog(
            [row["ranks"] for row in known],
            [row[key] for row in known],
            "o-",
            label=COLUMNS[key].partition(",")[0],
        )
    ends = [rows[0]["ranks"], rows[-1]["ranks"]]
    axes.loglog(
        ends, [1e-4 * rank / ends[0] for rank in ends], color="0.7", label="proportional to the ranks"
    )
    axes.set_xlabel("ranks")
    axes.set_ylabel("seconds")
    axes.set_title(f"Llama {model}, ZeRO-3: before the first step")
    finish(axes)
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="70b")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        print(json.dumps(measure(args.model, args.ranks)))
        return
    rows = []
    for ranks in RANKS:
        command = [sys.executable, "-m", "benchmarks.scale", "--model", args.model, "--ranks", str(ranks)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(f"{ranks} ranks: {rows[-1]}", flush=True)
    draw(rows, args.model, PAGE.with_suffix(".png"))
    about = describe_session()
    made = f"{about['date']}, commit {about['commit']}, {about['cpu']}, torch {about['versions']['torch']}"
    PAGE.write_text(ABOUT.format(model=args.model.upper(), made=made, table=table(rows)))


if __name__ == "__main__":
    main()
