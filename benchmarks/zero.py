"""ZeRO 0-3 against DDP, FSDP2, DeepSpeed and plain PyTorch.

    python -m benchmarks.zero --model small --repeat 3

Two ranks with one thread each; every row trains the same model on the same text, in turns. Prints the tables
and leaves the records in benchmarks/results/."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from benchmarks.report import report
from benchmarks.sweep import ROOT, Row, run, sweep
from benchmarks.workload import Work

WORK = {
    "tiny": Work("tiny", global_batch=8, micro_batch=2, steps=8, warmup=3),
    "small": Work("small", global_batch=4, micro_batch=2, steps=8, warmup=3),
    "medium": Work("medium", global_batch=2, micro_batch=1, steps=6, warmup=2),
}
LIMIT_S = {"tiny": 120.0, "small": 240.0, "medium": 400.0}
WARM_UP_LIMIT_S = 900.0  # g++ on a busy machine takes its time

GROUPS = ["one rank", "stage 0", "stage 1", "stage 2", "stage 3"]

# glibc's malloc: keep what was freed (fast), or hand large blocks back at once (small).
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
HAND_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}
SMALL_BUCKETS = {"bucket": 5_000_000}
FEW_LIVE = SMALL_BUCKETS | {"max_live": 10_000_000}

OURS = [
    Row("ours, one rank", ("one rank",), "ours", world=1),
    *(Row(f"ours {stage}", (f"stage {stage}",), "ours", flags={"stage": stage}) for stage in range(4)),
]
PEERS = [
    Row("plain PyTorch", ("one rank",), "single", world=1),
    Row("DDP", ("stage 0",), "ddp"),
    *(
        Row(f"DeepSpeed {stage}", (f"stage {stage}",), "deepspeed", flags={"stage": stage})
        for stage in range(4)
    ),
    Row("FSDP2, keep after forward", ("stage 1", "stage 2"), "fsdp2", flags={"reshard": False}),
    Row("FSDP2, reshard after forward", ("stage 3",), "fsdp2", flags={"reshard": True}),
]
TUNED = [
    Row("DDP, malloc keeps", ("stage 0",), "ddp", environment=KEEP),
    Row("DeepSpeed 1, buckets 5e6", ("stage 1",), "deepspeed", flags={"stage": 1} | SMALL_BUCKETS),
    Row("DeepSpeed 2, buckets 5e6", ("stage 2",), "deepspeed", flags={"stage": 2} | SMALL_BUCKETS),
    Row("DeepSpeed 3, buckets 5e6, live 1e7", ("stage 3",), "deepspeed", flags={"stage": 3} | FEW_LIVE),
    Row(
        "FSDP2, keep, malloc keeps",
        ("stage 1", "stage 2"),
        "fsdp2",
        flags={"reshard": False},
        environment=KEEP,
    ),
    Row("FSDP2, reshard, malloc keeps", ("stage 3",), "fsdp2", flags={"reshard": True}, environment=KEEP),
    Row(
        "FSDP2, reshard, malloc hands back",
        ("stage 3",),
        "fsdp2",
        flags={"reshard": True},
        environment=HAND_BACK,
    ),
]


def choose(groups: list[str], tuned: bool, only: str) -> list[Row]:
    """The rows of some groups, ours and its peers next to each other in time."""
    rows = OURS + PEERS + (TUNED if tuned else [])
    wanted = [
        replace(row, groups=tuple(group for group in row.groups if group in groups))
        for row in rows
        if set(row.groups) & set(groups) and only.lower() in row.name.lower()
    ]
    return sorted(wanted, key=lambda row: GROUPS.index(row.groups[0]))


def compile_ops() -> None:
    """DeepSpeed compiles its ops at first use: not in the time of a row."""
    print("DeepSpeed's ops: compiling, where that has not been done", flush=True)
    work = replace(WORK["tiny"], steps=2, warmup=1)
    record = run(Row("warm up", (), "deepspeed", flags={"stage": 1}), work, WARM_UP_LIMIT_S)
    if "failed" in record:
        print(f"DeepSpeed does not run here:\n{record['failed']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=WORK, default="small")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeat", type=int, default=3, help="turns over all rows")
    parser.add_argument("--group", action="append", choices=GROUPS, help="a table to run; may be repeated")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--no-tuned", action="store_true", help="peers with their defaults only")
    parser.add_argument("--out", type=Path, help="records; default: benchmarks/results/zero-MODEL-DATE.jsonl")
    args = parser.parse_args()
    stamp = datetime.now().strftime("%Y%m%d-%H%M")
    out = args.out or ROOT / "benchmarks" / "results" / f"zero-{args.model}-{stamp}.jsonl"
    rows = choose(args.group or GROUPS, not args.no_tuned, args.only)
    if any(row.peer == "deepspeed" for row in rows):
        compile_ops()
    sweep(rows, replace(WORK[args.model], dtype=args.dtype), args.repeat, out, LIMIT_S[args.model])
    print(report(out))
    print(f"records: {out}")


if __name__ == "__main__":
    main()
