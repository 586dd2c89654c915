"""Report of a hung run: the state of every rank in a few lines, and all stacks in a file."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = "hang.txt"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_OURS = re.compile(
    r"/torch/|/launcher/(comm|zero|pipeline|engine)/|/threading\.py|/launcher/cluster/rank\.py|<frozen"
)
"""Frames in which a rank waits for others; the first frame outside of these is the interesting one."""


@dataclass(frozen=True)
class RankState:
    """The known state of a rank that may hang."""

    rank: int
    host: str
    number: int | None
    """The number of the operation that it began last, counted within the same group of ranks; None if it has
    reported none."""
    text: str
    since_s: float
    stack: str
    """The stacks of all its threads, as written by faulthandler; empty if it wrote none."""
    among: str = ""
    """The ranks that take part in the operation, in words; empty for local and point-to-point operations."""

    @property
    def operation(self) -> str:
        return f"{self.text}{f' among {self.among}' if self.among else ''} (number {self.number})"


def describe(states: Sequence[RankState], log_dir: str) -> str:
    """Return the report for the terminal."""
    shown = [s for s in states if s.number is not None]
    if not shown:
        return "no rank has made progress for a while, and none has reported any operation"
    stalled = min(s.since_s for s in shown)
    lines = [f"no rank has made progress for {stalled:.0f} s"]
    operation, _ = Counter(s.operation for s in shown).most_common(1)[0]
    same = [s for s in shown if s.operation == operation]
    lines.append(f"  {_named(same)} in {operation}{_at(same[0]) if len(same) == 1 else ''}")
    lines += [f"  {_who(s)} {_other(s, same[0])}{_at(s)}" for s in states if s not in same]
    return "\n".join([*lines, f"  all stacks: {Path(log_dir) / FILE}"])


def write(states: Sequence[RankState], log_dir: str, file: str = FILE) -> None:
    """Write the stacks of all ranks to a file in the log directory."""
    parts = []
    for state in states:
        last = f"{state.operation}, {state.since_s:.1f} s ago" if state.number else "no operation reported"
        parts.append(f"==== rank {state.rank} on {state.host}: {last}\n{state.stack or 'no stack'}\n")
    with contextlib.suppress(OSError):  # a full disk must not hide the hang
        Path(log_dir).mkdir(parents=True, exist_ok=True)  # the logs may exist on the nodes only
        (Path(log_dir) / file).write_text("\n".join(parts), encoding="utf-8")


def place(stack: str) -> str | None:
    """Return where the main thread is, `data.py:88 in next_batch`, outside of code that waits for other
    ranks."""
    threads = re.split(r"\n(?=(?:Current t|T)hread 0x)", "\n" + stack.strip())
    current = [thread for thread in threads if thread.startswith("Current thread")] or threads[-1:]
    frames = [match for line in current[0].splitlines() if (match := _FRAME.match(line))]
    outside = [frame for frame in frames if not _OURS.search(frame["file"])] or frames
    if not outside:
        return None
    frame = outside[0]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"


def _named(states: Sequence[RankState]) -> str:
    if len(states) == 1:
        return f"{_who(states[0])} is"
    numbers = sorted(s.rank for s in states)
    return f"ranks {','.join(map(str, numbers[:16]))}{',...' if len(numbers) > 16 else ''} wait"


def _who(state: RankState) -> str:
    return f"rank {state.rank} ({state.host})"


def _other(state: RankState, most: RankState) -> str:
    if state.number is None:
        return "has not reported any operation yet"
    alike = state.among and state.among == most.among  # otherwise the numbers are not comparable
    never = alike and state.number < (most.number or 0)
    return f"{'never entered it; its last operation was' if never else 'was last in'} {state.operation}"


def _at(state: RankState) -> str:
    where = place(state.stack)
    return f", at {where}" if where else ""
