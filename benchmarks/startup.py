"""From the command to the ranks of a trivial script on two pretend machines, beside torchrun and DeepSpeed's launcher.

    python -m benchmarks.startup [--repeat 5] [--out benchmarks/results/startup.md]

Two ranks on each machine print a line and import nothing, so what is measured is the launcher's own: the time until the
first of these lines is on the terminal, until all four ranks have written theirs, and until the command has ended. All
machines share the cores of this one (tests/testbed); everybody runs once, then all again. Needs root and sshd, and pdsh
for DeepSpeed."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.sweep import describe_session, wait_until_idle
from tests.cluster.fault_table import WAYS
from tests.cluster.testbed import SCRIPT, Hosts

SCRIPT_OF_RANKS = """
import os, pathlib, time
pathlib.Path("began" + os.environ["RANK"]).write_text(str(time.time()))
print("a rank is here", flush=True)
"""
ROWS = {
    "ssh alone: `ssh node2 python -c pass`": "floor",
    "launch, over ssh": "ssh",
    "launch, over pdsh": "pdsh",
    "torchrun, typed over ssh": "torchrun",
    "deepspeed, over pdsh": "deepspeed",
}
LIMIT_S = 120
HEAD = """# From the command to the first line of a rank

{doc}
Written by `python -m benchmarks.startup --repeat {repeat}`. {session}
Load average before, by turn: {loads}. Seconds: median (smallest - largest).

| | first line | all four ranks | command has ended |
|---|---:|---:|---:|
"""


@contextmanager
def machines() -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    hosts = Hosts(folder)
    try:
        hosts("up", 2)
        yield hosts
    finally:
        hosts("down")
        shutil.rmtree(folder, ignore_errors=True)


def measure(hosts: Hosts, way: str) -> list[float]:
    """Seconds until the first line, all ranks, the end; of "floor" until the end alone."""
    cwd = Path(tempfile.mkdtemp(prefix="startup-", dir=hosts.folder))
    (cwd / "script.py").write_text(SCRIPT_OF_RANKS)
    if way == "floor":
        command = ["ssh", "node2", f"{sys.executable} -c pass"]
    else:
        command = WAYS[way].command(hosts.hostfile(cwd, slots=2), ())
    began, first = time.time(), 0.0
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "exec", "head", "--", *command],
        cwd=cwd,
        env={**hosts.env, "DS_ACCELERATOR": "cpu", "PDSH_RCMD_TYPE": "ssh"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = []
    try:
        for line in process.stdout:
            output.append(line)
            if "a rank is here" in line and not first:
                first = time.time()
        code = process.wait(timeout=LIMIT_S)
    finally:
        process.kill()
    ended = time.time()
    if way == "floor":
        return [ended - began]
    ranks = [float(path.read_text()) for path in cwd.glob("began*")]
    if code != 0 or len(ranks) != 4 or not first:
        sys.exit(f"{way} ended with {code}:\n{''.join(output)}")
    return [first - began, max(ranks) - began, ended - began]


def main(repeat: int, out: Path) -> None:
    times: dict[str, list[list[float]]] = {name: [] for name in ROWS}
    loads = []
    with machines() as hosts:
        for turn in range(repeat):
            loads.append(f"{os.getloadavg()[0]:.1f}")
            for name, way in ROWS.items():
                wait_until_idle()
                times[name].append(measure(hosts, way))
                print(f"turn {turn + 1}  {name:40s}", *(f"{s:6.2f}" for s in times[name][-1]), flush=True)
    facts = describe_session()
    session = ", ".join(f"{key}: {value}" for key, value in facts.items())
    text = HEAD.format(doc=_explained(), repeat=repeat, session=session, loads=", ".join(loads))
    for name, turns in times.items():
        columns = list(zip(*turns, strict=True))
        cells = [f"{median(c):.2f} ({min(c):.2f} - {max(c):.2f})" for c in columns]
        text += f"| {name} | {' | '.join(['', '', *cells][-3:])} |\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(text)


def _explained() -> str:
    """The last paragraph of this file's first words."""
    return (__doc__ or "").partition("\n\n    python")[2].partition("\n\n")[2] + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/startup.md"))
    asked = parser.parse_args()
    main(asked.repeat, asked.out)
