"""Run rows one after another, each in its own processes, and append their records to a JSONL file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.workload import Work

ROOT = Path(__file__).resolve().parents[1]
MARK = "RESULT "
IDLE_LIMIT_S = 25.0
PACKAGES = ["torch", "transformers", "deepspeed"]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        name: its name in the table.
        groups: the tables that contain it; ratios compare rows of one group.
        peer: file of `benchmarks/peers`.
        world: ranks; 1 runs without torchrun.
        flags: of `benchmarks.peers.base.Flags`.
        environment: variables of its processes only, such as malloc's thresholds.
    """

    name: str
    groups: tuple[str, ...]
    peer: str
    world: int = 2
    flags: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Return whether this row is the launcher's."""
        return self.peer == "ours"


def sweep(rows: Iterable[Row], work: Work, repeat: int, out: Path, limit_s: float) -> None:
    """Run all rows once, then again, `repeat` times, so that drifts of the machine affect all rows equally."""
    rows = list(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    append(out, {"session": describe_session(), "work": asdict(work), "rows": [asdict(row) for row in rows]})
    for turn in range(repeat):
        for row in rows:
            wait_until_idle()
            record = run(row, work, limit_s)
            kept = {"failed": _reason(record["failed"])} if "failed" in record else record
            append(out, kept | {"row": row.name, "turn": turn})
            print(_line(record, row, turn), flush=True)


def run(row: Row, work: Work, limit_s: float) -> dict[str, Any]:
    """Run a row once; return its record, or `{"failed": last lines of its output}`."""
    environment = os.environ | row.environment
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": _python_path()}
    process = subprocess.Popen(
        command(row, work),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks on SIGTERM; SIGKILL would orphan them
        output = process.communicate()[0] + f"\nError: no result within {limit_s:g} s"
    results = [line for line in output.splitlines() if line.startswith(MARK)]
    if not results:
        return {"failed": output[-3000:]}
    record: dict[str, Any] = json.loads(results[-1].removeprefix(MARK))
    return record


def command(row: Row, work: Work) -> list[str]:
    """Return the command line of a run."""
    settings = {**asdict(work), **row.flags, "peer": row.peer}
    options = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    if row.world == 1:
        return [sys.executable, "-m", "benchmarks.run_peer", *options]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(row.world),
        "--master-port",
        _free_port(),
    ]
    return [sys.executable, *torchrun, "-m", "benchmarks.run_peer", *options]


def wait_until_idle() -> None:
    """Wait, with a limit, until other processes use less than 15 % of the machine."""
    end = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < end:
        before = _cpu_ticks()
        time.sleep(1)
        spent = [now - then for now, then in zip(_cpu_ticks(), before, strict=True)]
        idle = spent[3] + spent[4]
        if 1 - idle / max(1, sum(spent)) < 0.15:
            return


def describe_session() -> dict[str, Any]:
    """Return machine, versions, commit and date."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "date": datetime.now().isoformat(timespec="minutes"),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+changes" if _git("status", "--porcelain") else ""),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "versions": versions,
    }


def append(out: Path, record: dict[str, Any]) -> None:
    """Append a line to a JSONL file."""
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _reason(output: str) -> str:
    """Return the last error in an output, without local directories."""
    errors = [line for line in output.splitlines() if "Error: " in line and "ChildFailedError" not in line]
    text = errors[-1] if errors else output[-160:]
    for place in (sys.prefix, sys.base_prefix, str(ROOT), str(Path.home())):
        text = text.replace(place, "...")
    return text[:160]


def _line(record: dict[str, Any], row: Row, turn: int) -> str:
    head = f"turn {turn + 1}  {row.name:44s}"
    if "failed" in record:
        return f"{head} FAILED: {_reason(record['failed'])}"
    return (
        f"{head} {record['step_ms_median']:8.1f} ms {record['tokens_per_s']:8.1f} tokens/s "
        f"peak {max(record['peak_rss_mb'])} MB  others used {record['foreign_cpu']:.0%}"
    )


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _cpu_ticks() -> list[int]:
    return [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _git(*args: str) -> str:
    result = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else "unknown"
