"""Files that record when the actions of a step ran: our own format, and traces for Perfetto.

A record: {"schedule", "stages", "chunks", "microbatches", "actions": [{"rank", "kind", "stage", "microbatch",
"start", "end"}, ...]}; kinds F, B, I, W; `stage` is the virtual stage; times are seconds on one clock for all
ranks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.files import replace_text
from launcher.pipeline.schedules.actions import COMPUTE, Action, ActionKind
from launcher.pipeline.timeline.simulate import Span, Timeline

TIMELINE = "schedule.json"
"""File name in the directory of a run; contains one of its last steps."""
MOST = 1 << 14
"""Upper bound on the stages, chunks or microbatches of a run."""


def write(path: str | Path, timeline: Timeline) -> None:
    """Write the record of a step, one action per line, atomically: it may be read during a run."""
    head = {
        "schedule": timeline.name,
        "stages": timeline.stages,
        "chunks": timeline.chunks,
        "microbatches": timeline.microbatches,
    }
    rows = [
        json.dumps(
            {
                "rank": rank,
                "kind": str(span.action.kind),
                "stage": span.action.stage,
                "microbatch": span.action.microbatch,
                "start": span.start,
                "end": span.end,
            }
        )
        for rank, spans in enumerate(timeline.spans)
        for span in spans
    ]
    text = json.dumps(head)[:-1] + ', "actions": [\n' + ",\n".join(rows) + "\n]}\n"
    replace_text(Path(path), text)


def read(path: str | Path) -> Timeline:
    """Read the record of a step. Actions may be in any order.

    Raises:
        LauncherError: the file cannot be read, or is not a record.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        stages, chunks, microbatches = (_count(record, key) for key in ("stages", "chunks", "microbatches"))
        spans: list[list[Span]] = [[] for _ in range(stages)]
        for row in record["actions"]:
            spans[_index(row, "rank", len(spans))].append(_span(row, record))
        timeline = Timeline(
            str(record["schedule"]),
            len(spans),
            chunks,
            microbatches,
            tuple(tuple(sorted(of_rank, key=lambda span: span.start)) for of_rank in spans),
        )
    except OSError as error:
        raise LauncherError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise LauncherError(
            f"{path} is not a recorded pipeline step: {what}",
            fix="use a file written by a pipeline run",
        ) from None
    if not all(timeline.spans):
        idle = [rank for rank, of_rank in enumerate(timeline.spans) if not of_rank]
        raise LauncherError(f"{path} has no actions of ranks {idle}", fix="use a record of all ranks")
    return timeline


def _span(row: dict[str, Any], record: dict[str, Any]) -> Span:
    kind = ActionKind(row["kind"])
    start, end = float(row["start"]), float(row["end"])
    if kind not in COMPUTE:
        raise ValueError(f"{kind} is not a compute action")
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError("a time is not finite")
    if not start <= end:
        raise ValueError(f"an action ends at {end}, before its start at {start}")
    stage = _index(row, "stage", int(record["stages"]) * int(record["chunks"]))
    return Span(Action(kind, stage, _index(row, "microbatch", int(record["microbatches"]))), start, end)


def _count(record: dict[str, Any], key: str) -> int:
    """Return a plausible count: a damaged file must not cause a huge allocation."""
    number = int(record[key])
    if not 1 <= number <= MOST:
        raise ValueError(f"invalid {key} {number}")
    return number


def _index(row: dict[str, Any], key: str, count: int) -> int:
    """Return an index in [0, count): a negative index must not address from the end."""
    number = int(row[key])
    if not 0 <= number < count:
        raise ValueError(f"{key} {number} is out of range for {count}")
    return number


def trace(*timelines: Timeline) -> dict[str, Any]:
    """Return timelines as a trace for https://ui.perfetto.dev or chrome://tracing: one process per timeline,
    one thread per rank.

    A unit of a simulated timeline is shown as a second; every timeline starts at 0.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_named("process_name", process, 0, f"{timeline.name} {process}"))
        for rank, spans in enumerate(timeline.spans):
            events.append(_named("thread_name", process, rank, f"rank {rank}"))
            events += [
                {
                    "name": str(span.action),
                    "cat": str(span.action.kind),
                    "ph": "X",
                    "pid": process,
                    "tid": rank,
                    "ts": (span.start - timeline.start) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                }
                for span in spans
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
