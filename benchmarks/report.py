"""Print Markdown tables of a session's records:  python -m benchmarks.report benchmarks/results/FILE.jsonl"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = [
    "row",
    "ms/step (min-max)",
    "tokens/s",
    "CPU s/step",
    "speed / best peer",
    "peak RSS MB",
    "RSS / smallest peer",
    "held MB",
    "loss off",
    "others' CPU",
    "runs",
]


# Largest relative difference of a step's loss from plain PyTorch's; above it, the row is wrong.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
DISTURBED = 0.1  # CPU share of other processes; such a run does not count if there is another


@dataclass(frozen=True)
class Line:
    """A row over all its turns.

    Memory is the maximum over ranks; `loss_off` is the largest relative difference of a step's loss from plain
    PyTorch's (nan without that row).
    """

    name: str
    peer: str
    ours: bool
    step_ms: list[float]
    tokens_per_s: float
    cpu_s: float
    speed_by_turn: dict[int, float]
    peak_rss_mb: float
    held_mb: float
    loss_off: float
    foreign_cpu: float


def lines_of(file: Path) -> tuple[dict[str, Any], dict[str, list[Line]]]:
    """Return the last session of a file, and its completed rows by group."""
    session, runs = _last_session(file)
    truth, groups = _truth(runs), dict[str, list[Line]]()
    for row in session["rows"]:
        if of_row := _good(_of_row(row, runs)):
            for group in row["groups"]:
                groups.setdefault(group, []).append(_line(row, of_row, truth))
    return session, groups


def report(file: Path) -> str:
    """Return the tables of the last session in a file: our rows first, then the peers, fastest first."""
    session, runs = _last_session(file)
    truth = _truth(runs)
    parts = [heading(session)]
    for group in dict.fromkeys(group for row in session["rows"] for group in row["groups"]):
        rows = [row for row in session["rows"] if group in row["groups"]]
        parts.append(f"\n#### {group}\n\n" + _table(rows, runs, truth))
    if wrong := wrong_losses(file):
        limit = TOLERANCE[session["work"]["dtype"]]
        parts.append(
            f"\n**Losses are more than {limit:g} from plain PyTorch's: {', '.join(wrong)}. These rows did another job: "
            "their numbers are not comparable.**"
        )
    return "\n".join(parts)


def wrong_losses(file: Path) -> list[str]:
    """Return rows of the last session whose losses differ from plain PyTorch's; none if that did not run."""
    session, runs = _last_session(file)
    truth, limit = _truth(runs), TOLERANCE[session["work"]["dtype"]]
    lines = [_line(row, of_row, truth) for row in session["rows"] if _good(of_row := _of_row(row, runs))]
    # a nan loss counts as wrong; without a reference all differences are nan
    return [line.name for line in lines if truth is not None and not line.loss_off <= limit]


def _truth(runs: list[dict[str, Any]]) -> list[float] | None:
    return next((run["losses"] for run in runs if run.get("peer") == "single"), None)


def _of_row(row: dict[str, Any], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if run["row"] == row["name"]]


def _last_session(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    first = max(i for i, record in enumerate(records) if "session" in record)
    return records[first], records[first + 1 :]


def heading(session: dict[str, Any]) -> str:
    """Return date, commit, machine, versions and the job."""
    about, work = session["session"], session["work"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['date']}, commit {about['commit']}. {about['cpu']}, {about['cores']} cores, "
        f"{about['memory_gib']} GiB; Python {about['python']}, {versions}.\n"
        f"Llama {work['model']}, {work['dtype']}, {work['seq']} tokens per sequence, global batch "
        f"{work['global_batch']}, micro-batch {work['micro_batch']}, one thread per rank."
    )


def _table(rows: list[dict[str, Any]], runs: list[dict[str, Any]], truth: list[float] | None) -> str:
    lines = [_line(row, of_row, truth) for row in rows if _good(of_row := _of_row(row, runs))]
    lines.sort(key=lambda line: (not line.ours, -line.tokens_per_s))
    failed = [row["name"] for row in rows if not _good(_of_row(row, runs))]
    out = [_markdown(COLUMNS), _markdown(["---"] + ["---:"] * (len(COLUMNS) - 1))]
    out += [_markdown(_cells(line, lines)) for line in lines]
    out += [_markdown([name, "failed"] + [""] * (len(COLUMNS) - 2)) for name in failed]
    return "\n".join(out + _against(lines))


def _against(lines: list[Line]) -> list[str]:
    """Compare each of our rows with each peer."""
    out = []
    for ours in (line for line in lines if line.ours):
        for peer in (line for line in lines if not line.ours):
            speed, memory = _speed_ratio(ours, [peer]), ours.peak_rss_mb / peer.peak_rss_mb
            out.append(f"- {ours.name} / {peer.name}: speed {speed:.2f}, peak RSS {memory:.2f}")
    return ["", *out] if out else []


def _good(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the completed runs; only undisturbed ones, if there are any."""
    done = _done(runs)
    return [run for run in done if run["foreign_cpu"] <= DISTURBED] or done


def _done(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if "failed" not in run]


def _line(row: dict[str, Any], runs: list[dict[str, Any]], truth: list[float] | None) -> Line:
    good = _good(runs)
    return Line(
        name=row["name"],
        peer=row["peer"],
        ours=row["peer"] == "ours",
        step_ms=[run["step_ms_median"] for run in good],
        tokens_per_s=statistics.median(run["tokens_per_s"] for run in good),
        cpu_s=statistics.median(run["cpu_s_per_step"] for run in good),
        speed_by_turn={run["turn"]: run["tokens_per_s"] for run in good},
        peak_rss_mb=statistics.median(max(run["peak_rss_mb"]) for run in good),
        held_mb=max(rank["after_step"] for run in good for rank in run["live_mb"]),
        loss_off=_worst(_distance(run["losses"], truth) for run in _done(runs)),
        foreign_cpu=max(run["foreign_cpu"] for run in good),
    )


def _distance(losses: list[float], truth: list[float] | None) -> float:
    if truth is None:
        return float("nan")
    return _worst(abs(loss - true) / abs(true) for loss, true in zip(losses, truth, strict=True))


def _worst(values: Iterable[float]) -> float:
    """Return the largest value, or nan if one is nan."""
    return max(values, key=lambda value: (math.isnan(value), value))


def _cells(line: Line, lines: list[Line]) -> list[str]:
    peers = [other for other in lines if not other.ours]
    smallest = min((peer.peak_rss_mb for peer in peers), default=float("nan"))
    return [
        f"**{line.name}**" if line.ours else line.name,
        f"{statistics.median(line.step_ms):.0f} ({min(line.step_ms):.0f}-{max(line.step_ms):.0f})",
        f"{line.tokens_per_s:.0f}",
        f"{line.cpu_s:.2f}",
        _figure(_speed_ratio(line, peers), ".2f"),
        f"{line.peak_rss_mb:.0f}",
        _figure(line.peak_rss_mb / smallest, ".2f"),
        f"{line.held_mb:.0f}",
        _figure(line.loss_off, ".0e"),
        f"{line.foreign_cpu:.0%}",
        str(len(line.step_ms)),
    ]


def speed_ratios(line: Line, peers: list[Line]) -> list[float]:
    """Return this row's speed relative to the fastest peer of the same turn, for each turn."""
    ratios = []
    for turn, speed in line.speed_by_turn.items():
        rivals = [peer.speed_by_turn[turn] for peer in peers if turn in peer.speed_by_turn]
        if rivals:
            ratios.append(speed / max(rivals))
    return ratios


def _speed_ratio(line: Line, peers: list[Line]) -> float:
    return statistics.median(speed_ratios(line, peers) or [float("nan")])


def _figure(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _markdown(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    print(report(parser.parse_args().file))


if __name__ == "__main__":
    main()
