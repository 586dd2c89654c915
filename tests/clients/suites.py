"""Other projects' tests of their DeepSpeed integration, run from checkouts on both engines."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests.clients.client import OURS, Client

REPORT = "outcomes.xml"
PASSED, SKIPPED = "passed", "skipped"


def command(client: Client, engine: str) -> list[str]:
    """Return the pytest command for their files, in their working directory; ours uses `launch shim run`."""
    shim = [sys.executable, "-m", "launcher.cli.main", "shim", "run", "--"] if engine == OURS else []
    return [
        *shim, sys.executable, "-m", "pytest", *client.tests, "--rootdir", ".", "-c", "/dev/null",
        "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--tb", "short", "-W", "ignore",
        "--timeout", str(client.limit_s), "--junitxml", REPORT,
    ]  # fmt: skip


def reported(cwd: Path) -> bool:
    return (cwd / REPORT).exists()


def outcomes(cwd: Path) -> dict[str, str]:
    """Return test -> "passed", "skipped", or the first line of the failure."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(cwd / REPORT).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        wrong = [entry for entry in case if entry.tag in ("failure", "error")]
        if wrong:
            found[name] = " ".join((wrong[0].get("message") or "failed").split())[:300]
        else:
            found[name] = SKIPPED if case.find("skipped") is not None else PASSED
    return found


def compared(client: Client, ours: dict[str, str], theirs: dict[str, str]) -> tuple[str, bool]:
    """Return the verdict: how many tests that pass with DeepSpeed pass here, and which do not."""
    passing = [name for name, outcome in theirs.items() if outcome == PASSED]
    failing = [name for name in passing if ours.get(name) != PASSED]
    kinds = Counter(SKIPPED if value == SKIPPED else "failed" for value in theirs.values() if value != PASSED)
    more = sum(outcome == PASSED and theirs.get(name) != PASSED for name, outcome in ours.items())
    text = f"{len(passing) - len(failing)} of {len(passing)} tests that pass with DeepSpeed pass"
    if kinds["failed"]:
        text += f"; of {kinds['failed']} that fail with it, {more}"
    if failing:
        text += f"; not here: {', '.join(name.rpartition('.')[2] for name in failing)}"
    return text, bool(passing) and len(passing) - len(failing) >= client.least * len(passing)
