"""`RunView`: the state of a run for `launch top`, from the files that the run writes.

`logs/status.json` (cluster/run_status.py) has the status of every rank, `metrics.jsonl` the training metrics.
Only files are read, so monitoring does not slow the run down.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, LauncherError, printable
from launcher.files import read_small
from launcher.monitor.flight_recorder import COUNTED
from launcher.monitor.metrics import METRICS
from launcher.pipeline.timeline.recording import TIMELINE, read
from launcher.pipeline.timeline.simulate import Timeline

STATUS = "status.json"
SILENT_S = 10.0
"""Seconds without an update after which a run counts as silent; a live run writes its status every second."""
TAIL = 1 << 18
"""Bytes read from the end of metrics.jsonl: a few hundred steps."""
LARGEST_TIMELINE = 1 << 22
"""Maximum size of the record of a step in bytes: about ten thousand actions."""
GOES_ON = ("starting", "running", "restarting")
"""States of a run that has not ended."""
LATEST = 1e11
LARGEST = 1e18
"""Larger values are not valid times, sizes or losses."""
SHARES = ("compute", "wait", "checkpoint", "other")


EstimatedPeaks = Sequence[tuple[int, int]]
"""(rank, bytes) for some ranks, sorted by rank."""


@dataclass(frozen=True)
class RankView:
    """The status of a rank, with a breakdown of its time.

    Attributes:
        step: the last optimizer step that it completed; None before the first one.
        seconds: time per optimizer step.
        shares: fractions of its time, by `SHARES`: compute in forward, backward and step; waits for other
            ranks in these phases; stalls by checkpoint saves; all else, such as reading data.
    """

    rank: int
    host: str
    place: str
    pid: int
    step: int | None
    seconds: float | None
    shares: Mapping[str, float]
    memory: int
    peak: int
    doing: str
    since_s: float
    slow: dict[str, Any] | None
    """`phase`, `ratio` and `steps` of `stragglers.Straggler`; None if the rank is not slow."""


@dataclass(frozen=True)
class RunView:
    """The status of a run.

    Attributes:
        state: starting, running, restarting, completed, failed, interrupted, or silent (the status is stale).
        records: the last steps of metrics.jsonl; [] if the run is not a recipe.
        saved: (step, seconds since the epoch) of the last complete checkpoint.
    """

    directory: Path
    state: str
    command: str
    restarts: int
    started_at: float
    written_at: float
    ranks: list[RankView]
    messages: list[tuple[float, str]]
    records: list[dict[str, Any]] = field(default_factory=list)
    saved: tuple[int, float] | None = None
    timeline: Timeline | None = None
    """The timeline of the pipeline stages in one of the last steps."""
    estimate: EstimatedPeaks | None = None
    called: str = ""
    """The display name of the run; "" shows its directory."""
    samples: float = 0.0
    """Sequences per second, over all ranks."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values, for `launch top --json`."""
        ranks = [{**vars(rank), "shares": dict(rank.shares)} for rank in self.ranks]
        saved = None if self.saved is None else {"step": self.saved[0], "at": self.saved[1]}
        return {
            **{
                key: getattr(self, key)
                for key in ("state", "command", "restarts", "started_at", "written_at")
            },
            "directory": self.called or str(self.directory),
            "samples_per_s": self.samples,
            "last_metrics": self.records[-1] if self.records else None,
            "checkpoint": saved,
            "pipeline": self.timeline and {"schedule": self.timeline.name, "idle": self.timeline.bubble},
            "messages": [{"at": at, "text": text} for at, text in self.messages],
            "ranks": ranks,
        }


def read_estimate(path: Path) -> EstimatedPeaks:
    """Read the output of `launch memory-estimate --json`: (rank, peak bytes), sorted by rank.

    Raises:
        ConfigError: the file is not an estimate.
    """
    fix = "create one: launch memory-estimate --json ... > FILE"
    text = read_small(path, "the estimate", where="--estimate", fix=fix)
    try:
        told = json.loads(text, parse_constant=_refuse)["per_rank"]
        found = sorted((int(_number(each["rank"])), int(_number(each["peak_bytes"]))) for each in told)
        if any(rank < 0 or peak <= 0 for rank, peak in found):
            raise ValueError("a rank is negative, or has no peak memory")
        return found
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not an estimate: {error}",
            where="--estimate",
            fix=fix,
        ) from error


def estimated(view: RunView, rank: int) -> int | None:
    """Return the estimated peak bytes of a rank, taken from the first rank of its pipeline stage."""
    known = [peak for first, peak in view.estimate or () if first <= rank]
    return known[-1] if known else None


def find_status(given: str | None) -> Path:
    """Return the status file of a run's directory, or of the newest run below the working directory.

    Raises:
        ConfigError: there is no status file.
    """
    if given is not None:
        found = [
            path
            for path in (Path(given) / "logs" / STATUS, Path(given) / STATUS, Path(given))
            if path.is_file()
        ]
        if not found:
            raise ConfigError(
                f"no {STATUS} in {Path(given) / 'logs'}",
                where="launch top",
                fix="pass the directory of a run that `launch` started on this machine or on a shared "
                "file system",
            )
        return found[0]
    here = [
        *Path().glob(f"logs/{STATUS}"),
        *Path().glob(f"*/logs/{STATUS}"),
        *Path().glob(f"runs/*/logs/{STATUS}"),
    ]
    if not here:
        raise ConfigError(
            "no run found in the current directory",
            where="launch top",
            fix="pass the directory of a run: launch top runs/NAME",
        )
    return max(here, key=lambda path: path.stat().st_mtime)


def read_run(status: Path, before: RunView | None = None, counters: dict[int, Any] | None = None) -> RunView:
    """Return the current status of a run from its files.

    Args:
        status: from `find_status`.
        before: the previous view; returned again if nothing was written since.
        counters: each rank's counters at the previous read; times are measured since then. Updated in place.

    Raises:
        ConfigError: the file is not a run's status file.
    """
    try:
        content = json.loads(status.read_text(encoding="utf-8"), parse_constant=_refuse)
        if (
            before is not None
            and content["written_at"] == before.written_at
            and content["state"] != "running"
        ):
            return before
        return _view(status, content, {} if counters is None else counters)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{status} is not the status file of a run: {error}",
            where=str(status),
            fix="pass the directory of a run",
        ) from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a valid number")


def _number(value: Any) -> float:
    """Return the value as a float.

    Raises:
        ValueError: it is not a number, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        raise ValueError(f"{str(value)[:40]!r} is not a valid number")
    return float(value)


def _moment(value: Any) -> float:
    """Return a valid time in seconds since the epoch."""
    if not 0 <= (moment := _number(value)) < LATEST:
        raise ValueError(f"{moment} is not a valid time")
    return moment


def _view(status: Path, content: Mapping[str, Any], before: dict[int, Any]) -> RunView:
    directory = status.parent.parent if status.parent.name == "logs" else status.parent
    ranks, saved, samples = [], None, 0.0
    for told in content["ranks"]:
        counters = told["counters"] and {key: _number(value) for key, value in told["counters"].items()}
        since = _since(counters, before.get(told["rank"]))
        ranks.append(_rank(told, counters, since))
        if counters is not None:
            before[told["rank"]] = counters
            if counters["saved_step"] >= 0:
                saved = max(saved or (0, 0.0), (int(counters["saved_step"]), _moment(counters["saved_at"])))
            if since and since["total"] > 0 and since["counted"]:
                steps = counters["samples"] / max(counters["steps"], 1)
                samples = max(samples, steps * since["counted"] / since["total"])
    state = printable(str(content["state"]))
    if state == "running" and time.time() - content["written_at"] > SILENT_S:
        state = "silent"
    return RunView(
        directory=directory,
        state=state,
        command=str(content["command"]),
        restarts=int(content["restarts"]),
        started_at=_moment(content["started_at"]),
        written_at=_moment(content["written_at"]),
        ranks=ranks,
        messages=[(_moment(message["at"]), str(message["text"])) for message in content["messages"]],
        records=last_records(directory / METRICS),
        saved=saved,
        timeline=_timeline(directory / TIMELINE, _moment(content["started_at"])),
        samples=samples,
    )


def _timeline(path: Path, started_at: float) -> Timeline | None:
    """Return the timeline of this run, or None if it has no stages or the file is from another run."""
    try:
        if path.stat().st_size > LARGEST_TIMELINE or path.stat().st_mtime < started_at:
            return None
        return read(path)
    except (OSError, LauncherError):
        return None


def _since(
    counters: Mapping[str, float] | None, before: Mapping[str, float] | None
) -> dict[str, float] | None:
    """Return the counts since `before`, or since the start if `before` is None or has no fewer steps."""
    if counters is None:
        return None
    if before is None or counters["counted"] <= before["counted"]:
        return dict(counters)
    return {key: counters[key] - before[key] for key in counters}


def _rank(
    told: Mapping[str, Any], counters: Mapping[str, float] | None, since: Mapping[str, float] | None
) -> RankView:
    shares, seconds = dict.fromkeys(SHARES, 0.0), None
    if since is not None and since["total"] > 0 and since["counted"]:
        waited = sum(since[f"{phase}_wait"] for phase in COUNTED)
        worked = sum(since[phase] for phase in COUNTED) - waited
        known = {"compute": worked, "wait": waited, "checkpoint": since["checkpoint"]}
        shares = {key: min(max(value / since["total"], 0.0), 1.0) for key, value in known.items()}
        shares["other"] = max(0.0, 1.0 - sum(shares.values()))
        seconds = since["total"] / since["counted"]
    return RankView(
        rank=int(told["rank"]),
        host=str(told["host"]),
        place=str(told["place"]),
        pid=int(told["pid"]),
        step=None if counters is None else int(counters["steps"]),
        seconds=seconds,
        shares=shares,
        memory=0 if counters is None else int(counters["memory"]),
        peak=0 if counters is None else int(counters["peak"]),
        doing=str(told["doing"]),
        since_s=_number(told["since_s"]),
        slow=None if told["slow"] is None else _slow(told["slow"]),
    )


def _slow(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "phase": str(told["phase"]),
        "ratio": _number(told["ratio"]),
        "steps": int(_number(told["steps"])),
    }


def last_records(metrics: Path, tail: int | None = TAIL) -> list[dict[str, Any]]:
    """Return the last steps of a metrics.jsonl, or [] if there is none. Incomplete lines are skipped.

    Args:
        tail: number of bytes to read from the end; None reads the whole file.
    """
    try:
        with metrics.open("rb") as file:
            file.seek(0 if tail is None else max(0, metrics.stat().st_size - tail))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _is_drawable(record.get("step")):
            records.append({key: value for key, value in record.items() if _is_drawable(value)})
    return records


def _is_drawable(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters, each for the mean of a slice of the values."""
    if not values or width < 1:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    marks = "▁▂▃▄▅▆▇█"
    return "".join(marks[min(7, int(8 * (mean - low) / (high - low or 1)))] for mean in means)
