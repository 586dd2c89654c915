"""Do the tests find a fault? `make mutants` inserts faults one at a time into a copy of this tree, and runs the tests.

    python -m tests.mutants [NAME ...] [--full] [--to FILE]

Tests close to the fault run first, then all others, each until the first failure. With `--full` these are the tests of
`make test-all` (its pytest part). Exits with 1 if fewer than `WANTED` faults are found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
WANTED = 57 / 60  # share of the faults
LIMIT_S = 1800  # for one run of all tests
TEST_LIMIT_S = 150  # for one test; a hang counts as detected
NOTHING_TO_RUN = 5


@dataclass(frozen=True)
class Verdict:
    """The result for one fault.

    Args:
        by: the first test that failed; empty if none did.
        took_s: seconds until then.
    """

    by: str
    took_s: float


def main() -> int:
    flags = _flags()
    unknown = set(flags.names) - set(MUTANTS)
    if unknown:
        sys.exit(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(MUTANTS)}")
    names = flags.names or list(MUTANTS)
    verdicts = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = copy_of_the_tree(Path(directory, "tree"))
        for name in names:
            verdicts[name] = judged(tree, MUTANTS[name], ["--full"] if flags.full else [])
            line = f"{name}\t{verdicts[name].by or 'NOT FOUND'}\t{verdicts[name].took_s:.0f} s"
            print(line, flush=True)
            if flags.to:
                with flags.to.open("a") as file:
                    file.write(line + "\n")
    found = sum(bool(verdict.by) for verdict in verdicts.values())
    print(f"{found} of {len(names)} faults were found")
    return int(found < WANTED * len(names))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="faults of tests/mutants/table.py; default: all"
    )
    parser.add_argument("--full", action="store_true", help="with the cases that `make test` leaves out")
    parser.add_argument("--to", type=Path, metavar="FILE", help="add a line for each fault")
    return parser.parse_args()


def copy_of_the_tree(to: Path) -> Path:
    """Copy every file that git tracks, in its current state."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def judged(tree: Path, mutant: Mutant, flags: Sequence[str]) -> Verdict:
    """Insert the fault into the tree only while tests run."""
    path = tree / "launcher" / mutant.file
    right = path.read_text()
    path.write_text(mutant.applied(right))
    started = time.monotonic()
    try:
        others = [f"--ignore={part}" for part in mutant.nearby]
        by = first_failure(tree, [*mutant.nearby, *flags]) or first_failure(tree, [*others, *flags])
    finally:
        path.write_text(right)
    return Verdict(by, time.monotonic() - started)


def first_failure(tree: Path, arguments: Sequence[str]) -> str:
    """Return the name of the first failing test; empty if all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "--numprocesses=2",
        "--dist=loadfile",
        "--no-loadscope-reorder",
    ]
    command += ["--ignore=tests/mutants", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}"]
    command += ["--tb=no", "-rfE", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S} s"
    if done.returncode in (0, NOTHING_TO_RUN):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"


if __name__ == "__main__":
    sys.exit(main())
