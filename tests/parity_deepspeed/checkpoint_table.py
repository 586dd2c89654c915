"""Generate the tables in docs/checkpoints.md: which DeepSpeed checkpoints resume here, and which of ours resume there.

python -m tests.parity_deepspeed.checkpoint_table     runs the tests (15 minutes) and writes the page
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "checkpoints.md"
PLACE = "LAUNCHER_CHECKPOINT_TABLE"
"""Environment variable: the directory where the tests write their rows."""
TESTS = ("test_checkpoints.py", "test_split_checkpoints.py", "test_exports.py")
_INTRODUCTION = """# Checkpoints exchanged with DeepSpeed: what was tested

[Coming from DeepSpeed](migration.md#checkpoints) describes how to continue from a checkpoint. This page lists the
tests.

A run of the real DeepSpeed 0.19.8 makes {before} steps, saves, and makes {after} more. launcher loads the checkpoint,
with the same and other world sizes and at other ZeRO stages, and makes the same {after} steps. Weights are
bit-identical wherever DeepSpeed's own tools read them back (they do not read experts), and so are the moments of
stage 3; moments of other stages are compared by the steps that follow. The last column has the largest relative
difference of a loss, over all ranks and continuations. "2 at +1" means two ranks, at the next stage; after stage 3
comes stage 0. In the last rows launcher saves and exports, and DeepSpeed continues. `python -m
tests.parity_deepspeed.checkpoint_table` runs the tests and writes the {cells} rows.

| what | written | on ranks | goes on | largest difference |
|---|---|---|---|---|
{rows}
"""


def difference(got: Sequence[float], want: Sequence[float]) -> float:
    """Return the largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))


class Table:
    """The results of a test, by case; written on request."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, ...], float] = {}

    def add(self, case: Mapping[str, Any], written: str, ranks: int, ways: str, found: float) -> None:
        key = (_words(case), written, str(ranks), ways)
        self._rows[key] = max(found, self._rows.get(key, 0.0))

    def write(self, name: str) -> None:
        if place := os.environ.get(PLACE):
            rows = [[*key, found] for key, found in self._rows.items()]
            Path(place, f"{name}.json").write_text(json.dumps(rows))


def _words(case: Mapping[str, Any]) -> str:
    """Describe a case in words."""
    zero = case.get("zero", {})
    parts = [
        {"groups": "two param groups"}.get(case["kind"], case["kind"]),
        case.get("dtype", "fp32"),
        *([f"AutoTP over {case['tp']}"] if case.get("tp", 1) > 1 else []),
        *([f"PipelineModule of {case['pp']} stages"] if "pp" in case else []),
        *([f"experts, ep {case['ep']}"] if "ep" in case else []),
        *(f"{key} {value['device'] if isinstance(value, dict) else value}" for key, value in zero.items()),
    ]
    return ", ".join(parts)


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        tests = [str(Path(__file__).with_name(name)) for name in TESTS]
        command = [sys.executable, "-m", "pytest", *tests, "--full", "--timeout", "1000", "-n", "2"]
        env = os.environ | {PLACE: place, "LAUNCHER_TEST_PARITY": "1"}
        if code := subprocess.run(
            [*command, "--dist", "loadfile"], env=env, cwd=ROOT, check=False
        ).returncode:
            return code
        write(Path(place))
    return 0


def write(place: Path) -> None:
    """Write the page from the rows that the tests wrote to a directory."""
    from tests.parity_deepspeed.saves import AFTER, BEFORE

    rows = [row for path in sorted(place.glob("*.json")) for row in json.loads(path.read_text())]
    lines = [f"| {' | '.join(cells)} | {found:.0e} |" for *cells, found in rows]
    text = _INTRODUCTION.format(before=BEFORE, after=AFTER, cells=len(rows), rows="\n".join(lines))
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
