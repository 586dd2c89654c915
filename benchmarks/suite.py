"""A suite is a list of rows in groups, and the command that runs it. `zero.py` and `tensor.py` are suites."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from benchmarks.report import report, wrong_losses
from benchmarks.sweep import ROOT, Row, run, sweep
from benchmarks.workload import Work

LIMIT_S = {"tiny": 120.0, "small": 240.0, "medium": 400.0}
RESULTS = ROOT / "benchmarks" / "results"
WARM_UP_LIMIT_S = 900.0  # g++ is slow on a busy machine

# glibc's malloc: keep freed memory (fast), or return large blocks at once (small).
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
HAND_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}


@dataclass(frozen=True)
class Suite:
    """The rows of one command.

    Args:
        name: prefix of the file of records.
        work: the job, by model size.
        groups: the tables.
        ours, peers: rows with usual settings.
        tuned: peers with the settings that were measured to help them.
    """

    name: str
    work: dict[str, Work]
    groups: list[str]
    ours: list[Row]
    peers: list[Row]
    tuned: list[Row]

    def choose(self, groups: list[str], *, tuned: bool, only: str = "") -> list[Row]:
        """Return the rows of some groups, with ours and its peers adjacent in time."""
        rows = self.ours + self.peers + (self.tuned if tuned else [])
        wanted = [
            replace(row, groups=tuple(group for group in row.groups if group in groups))
            for row in rows
            if set(row.groups) & set(groups) and only.lower() in row.name.lower()
        ]
        return sorted(wanted, key=lambda row: self.groups.index(row.groups[0]))


def compile_ops() -> None:
    """Compile DeepSpeed's ops before the timed rows, since it compiles them at first use."""
    print("DeepSpeed's ops: compiling, where that has not been done", flush=True)
    record = run(
        Row("warm up", (), "deepspeed", flags={"stage": 1}), Work(steps=2, warmup=1), WARM_UP_LIMIT_S
    )
    if "failed" in record:
        print(f"DeepSpeed does not run here:\n{record['failed']}", flush=True)


def main(suite: Suite, description: str | None) -> None:
    """Run the command line of a suite. Exits with status 1 if a row's losses differ from plain PyTorch's."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=suite.work, default="small")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeat", type=int, default=3, help="turns over all rows")
    parser.add_argument(
        "--group", action="append", choices=suite.groups, help="a table to run; may be repeated"
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--no-tuned", action="store_true", help="peers with their defaults only")
    parser.add_argument(
        "--out", type=Path, help=f"records; default: benchmarks/results/{suite.name}-MODEL-DATE.jsonl"
    )
    args = parser.parse_args()
    out = args.out or results_file(suite, args.model)
    run_suite(
        suite, args.model, args.repeat, out, args.group, args.dtype, tuned=not args.no_tuned, only=args.only
    )
    if wrong_losses(out):
        parser.exit(1)


def results_file(suite: Suite, model: str) -> Path:
    """Return the path of a new file of records."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M")
    return RESULTS / f"{suite.name}-{model}-{stamp}.jsonl"


def run_suite(
    suite: Suite,
    model: str,
    repeat: int,
    out: Path,
    groups: list[str] | None = None,
    dtype: str = "fp32",
    *,
    tuned: bool = True,
    only: str = "",
) -> None:
    """Run the rows in turns, write the records to `out`, and print the tables.

    Args:
        repeat: turns.
        groups: default: all.
        only: rows whose name contains this.
    """
    rows = suite.choose(groups or suite.groups, tuned=tuned, only=only)
    if any(row.peer == "deepspeed" for row in rows):
        compile_ops()
    sweep(rows, replace(suite.work[model], dtype=dtype), repeat, out, LIMIT_S[model])
    print(report(out))
    print(f"records: {out}")
