"""`report.html`: a finished run as one static HTML file without scripts.

Uses only the standard library: the front end that writes it has no torch and no matplotlib.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError, printable
from launcher.files import read_small, replace_text
from launcher.monitor.metrics import METRICS, is_number
from launcher.monitor.progress import duration, short_number
from launcher.monitor.summary import PARTS
from launcher.pipeline.timeline.picture import NAMESPACE, svg
from launcher.pipeline.timeline.simulate import Timeline
from launcher.sizes import in_words
from launcher.top.run_view import SHARES, RankView, RunView, estimated, last_records, read_run

COLOURS = {"compute": "#3a7d44", "wait": "#e0a458", "checkpoint": "#3d6fb6", "other": "#c4ccd4"}
CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens/s",
    "lr": "learning rate",
    "mfu": "model FLOPs utilisation",
    "expert_load": "max expert load (relative to uniform)",
    "expert_entropy": "expert load entropy (1 = uniform)",
}
WIDTH, HEIGHT = 540, 200
MOST_POINTS = 1000
LONGEST_CONFIG = 1 << 20
STYLE = """body{font:15px/1.45 Helvetica,Arial,sans-serif;color:#1f2933;max-width:1140px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 9px;text-align:left;border-bottom:1px solid #e4e7eb}
td.n,th.n{text-align:right}.bar{display:flex;width:260px;height:13px}.slow{color:#b3261e;font-weight:600}
.key span{display:inline-block;width:11px;height:11px;margin:0 4px 0 14px}svg{max-width:100%;height:auto}
.curves{display:flex;flex-wrap:wrap;gap:12px}pre{background:#f0f2f5;padding:1em;font-size:12px;overflow-x:auto}
.wide{overflow-x:auto}"""


REPORT = "report.html"


def write_report(status: Path) -> Path | None:
    """Write the report of a recipe's run into its directory; return the file, or None if the run has no
    metrics.

    Raises:
        ConfigError: the status cannot be read.
        OSError: the report cannot be written.
    """
    view = read_run(status)
    if not (view.directory / METRICS).is_file():
        return None
    file = view.directory / REPORT
    replace_text(file, run_report(view))
    return file


def run_report(view: RunView) -> str:
    """Return the report of a run as HTML."""
    title = f"{view.called or view.directory.resolve().name}: {view.state}"
    records = last_records(view.directory / METRICS, None)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(_summary(view))}</p>",
        f"<pre>{_text(view.command)}</pre>" if view.command else "",
        '<div class="curves">'
        + "".join(_curve(records, key, name) for key, name in CURVES.items())
        + "</div>",
        "<h2>Ranks</h2>",
        '<p class="key">'
        + "".join(f'<span style="background:{COLOURS[n]}"></span>{n}' for n in SHARES)
        + "</p>",
        _ranks(view),
        _memory(view.directory / "summary.json"),
        _pipeline(view.timeline),
        "<h2>Messages</h2>",
        _messages(view.messages),
        _config(view.directory / "config.json"),
    ]
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    )
    return f"{head}<style>{STYLE}</style><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _text(text: object) -> str:
    return escape(printable(str(text)))


def _summary(view: RunView) -> str:
    steps = [rank.step for rank in view.ranks if rank.step is not None]
    hosts = {rank.host for rank in view.ranks}
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(view.started_at))
    parts = [
        f"started {began}, ran for {duration(max(0.0, view.written_at - view.started_at))}",
        f"{len(view.ranks)} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}",
        f"{max(steps)} steps" if steps else "no completed step",
    ]
    if view.restarts:
        parts.append(f"{view.restarts} restart{'s' * (view.restarts > 1)}")
    if view.saved is not None:
        parts.append(f"last checkpoint: step {view.saved[0]}")
    slow = [str(rank.rank) for rank in view.ranks if rank.slow is not None]
    if slow:
        parts.append(f"slow at the end: rank {', '.join(slow)}")
    return "; ".join(parts)


def _curve(records: Sequence[Mapping[str, Any]], key: str, name: str) -> str:
    """Return a metric over the steps as SVG, or "" with fewer than two values."""
    points = [(record["step"], record[key]) for record in records if is_number(record.get(key))]
    points = points[:: max(1, len(points) // MOST_POINTS)]
    if len(points) < 2:
        return ""
    steps, values = [float(step) for step, _ in points], [float(value) for _, value in points]
    low, high = min(values), max(values)
    left, right, top, bottom = 64.0, WIDTH - 10.0, 24.0, HEIGHT - 24.0

    def place(step: float, value: float) -> str:
        x = left + (right - left) * (step - steps[0]) / ((steps[-1] - steps[0]) or 1)
        y = bottom - (bottom - top) * (value - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, value) for step, value in zip(steps, values, strict=True))
    marks = [(left - 6, top + 4, "end", _number(high)), (left - 6, bottom, "end", _number(low))]
    marks += [
        (left, HEIGHT - 6, "start", f"step {steps[0]:.0f}"),
        (right, HEIGHT - 6, "end", f"{steps[-1]:.0f}"),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="#52606d">{text}</text>'
        for x, y, anchor, text in marks
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{name}">'
        f'<text x="{left}" y="14" font-size="13" font-weight="600">{name}</text>{texts}'
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#c4ccd4"/>'
        f'<polyline points="{line}" fill="none" stroke="#1f4e8c" stroke-width="1.5"/></svg>'
    )


def _pipeline(timeline: Timeline | None) -> str:
    """Return the timeline of the pipeline stages in one of the last steps."""
    if timeline is None:
        return ""
    picture = svg(timeline, "one of the last steps", unit="s").replace(
        f' xmlns="{NAMESPACE}"', ""
    )  # redundant inside an HTML page
    return f'<h2>Pipeline</h2><div class="wide">{picture}</div>'


def _number(value: float) -> str:
    return short_number(value) if abs(value) >= 1000 else f"{value:.3g}"


def _peak(rank: RankView, expected: int | None) -> str:
    if not rank.peak:
        return ""
    return in_words(rank.peak) + (
        f", {rank.peak / expected:.0%} of {in_words(expected)} estimated" if expected else ""
    )


def _ranks(view: RunView) -> str:
    places = any(rank.place for rank in view.ranks)
    names = (
        "rank",
        "host",
        *(("place",) if places else ()),
        "steps",
        "s/step",
        "time",
        "wait",
        "peak memory",
        "",
    )
    numbers = {"rank", "steps", "s/step", "wait", "peak memory"}
    rows = ["<tr>" + "".join(f'<th class="{"n" * (n in numbers)}">{n}</th>' for n in names) + "</tr>"]
    for rank in view.ranks:
        slow = "" if rank.slow is None else f"{rank.slow['phase']} {rank.slow['ratio']:.2f}x the other ranks"
        cells = (
            rank.rank, _text(rank.host), *((_text(rank.place),) if places else ()),
            "" if rank.step is None else rank.step,
            "" if rank.seconds is None else f"{rank.seconds:.3g}", _bar(rank),
            f"{rank.shares['wait']:.0%}" if rank.seconds else "", _peak(rank, estimated(view, rank.rank)),
            f'<span class="slow">{_text(slow)}</span>',
        )  # fmt: skip
        row = zip(names, cells, strict=True)
        rows.append(
            "<tr>" + "".join(f'<td class="{"n" * (n in numbers)}">{cell}</td>' for n, cell in row) + "</tr>"
        )
    return '<div class="wide"><table>' + "".join(rows) + "</table></div>"


def _memory(path: Path) -> str:
    """Return a table of measured and estimated memory of the first rank of each pipeline stage."""
    try:
        summary = json.loads(read_small(path, "the summary", where=str(path), fix=""))
        measured = {rank["rank"]: rank for rank in summary["ranks"]}
        rows = "".join(_memory_row(measured[each["rank"]], each) for each in summary["estimate"])
    except (LauncherError, ValueError, LookupError, TypeError, AttributeError):
        return ""  # not the run of a recipe, or no summary was written
    names = "".join(f'<th class="n">{name}</th>' for name in PARTS.values())
    where = (
        " (resident, including malloc fragmentation)" if str(summary.get("device")).startswith("cpu") else ""
    )
    return (
        f'<h2>Memory, measured{where} / estimated</h2><div class="wide"><table>'
        f'<tr><th class="n">rank</th>{names}</tr>{rows}</table></div>'
    )


def _memory_row(measured: Mapping[str, Any], estimated: Mapping[str, Any]) -> str:
    cells = [str(int(estimated["rank"]))]
    for key in PARTS:
        told = [None if each.get(key) is None else in_words(int(each[key])) for each in (measured, estimated)]
        cells.append(" / ".join(each or "?" for each in told))
    return "<tr>" + "".join(f'<td class="n">{_text(cell)}</td>' for cell in cells) + "</tr>"


def _bar(rank: RankView) -> str:
    if rank.seconds is None:
        return ""
    parts = "".join(
        f'<div title="{name} {rank.shares[name]:.0%}" style="background:{COLOURS[name]};width:{rank.shares[name]:.1%}">'
        "</div>"
        for name in SHARES
    )
    return f'<div class="bar">{parts}</div>'


def _messages(messages: Iterable[tuple[float, str]]) -> str:
    lines = [f"{time.strftime('%H:%M:%S', time.localtime(at))}  {_text(text)}" for at, text in messages]
    return "<pre>" + "\n".join(lines) + "</pre>" if lines else "<p>none</p>"


def _config(path: Path) -> str:
    try:
        text = read_small(path, "the file", where=str(path), fix="", largest=LONGEST_CONFIG)
        shown = json.dumps(json.loads(text), indent=1)
    except Exception:  # missing or incomplete: still show the rest
        return ""
    return f"<h2>Configuration</h2><details><summary>{_text(path.name)}</summary><pre>{_text(shown)}</pre></details>"
