"""A plan as a self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape

from launcher.estimate.plot import memory_bars
from launcher.pipeline.schedules import schedule as schedule_of
from launcher.pipeline.timeline.picture import svg
from launcher.pipeline.timeline.simulate import simulate
from launcher.plan.choose import WORDS, Choice, PlanSearch
from launcher.plan.memory import MemoryPredictor
from launcher.plan.pictures import as_svg, pareto
from launcher.plan.speed import stage_costs
from launcher.plan.work import ModelWork

SHOWN = 12  # microbatches in a timeline; more would be too small to see
STYLE = """body{font:15px/1.45 Helvetica,Arial,sans-serif;color:#1f2933;max-width:1140px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;font-size:13px}td,th{padding:3px 9px;text-align:right;border-bottom:1px solid #e4e7eb}
td:last-child,th:last-child{text-align:left}tr:nth-child(2){font-weight:600}svg{max-width:100%;height:auto}
pre{background:#f0f2f5;padding:1em;font-size:13px}"""


def page(
    title: str,
    work: ModelWork,
    place: PlanSearch,
    choices: Sequence[Choice],
    memory: MemoryPredictor,
    why: Sequence[str],
    text: str,
) -> str:
    """Return the report.

    Args:
        title: description of the request.
        choices: choices, best first.
        why: variations of the best choice, in words.
        text: configuration of the best choice.
    """
    best = choices[0]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(choices),
        "<h2>Time against memory</h2>",
        as_svg(pareto(choices, place.usable(best.layout))),
        f"<h2>Best layout: {escape(best.layout.in_words())}</h2>",
        as_svg(memory_bars(memory.of(best.layout), device=place.usable(best.layout))),
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in why) + "</ul>",
        _timeline(work, place, best),
        f"<pre>{escape(text)}</pre>",
    ]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{head}<style>{STYLE}</style><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _table(choices: Sequence[Choice]) -> str:
    names = [field.name for field in fields(choices[0].time)]
    head = ["s/step", "TFLOP/s", "GiB", *(WORDS[name] for name in names), "layout"]
    rows = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for choice in choices:
        total = choice.time.total
        cells = [f"{total:.3g}", f"{choice.flops / 1e12:.3g}", f"{choice.peak / 2**30:.1f}"]
        cells += [f"{getattr(choice.time, name) / total:.0%}" for name in names]
        rows.append(
            "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in [*cells, choice.layout.in_words()]) + "</tr>"
        )
    return "<table>" + "\n".join(rows) + "</table>"


def _timeline(work: ModelWork, place: PlanSearch, choice: Choice) -> str:
    layout = choice.layout
    if layout.pp == 1:
        return ""
    number = min(layout.accumulation, max(SHOWN, layout.pp) // layout.pp * layout.pp)
    made = schedule_of(
        layout.schedule, layout.pp, number, layout.chunks if layout.schedule == "interleaved" else None
    )
    shown = simulate(made, stage_costs(work, layout, place.device, place.per_node))
    title = f"{layout.schedule}, {layout.pp} stages, {number} of {layout.accumulation} microbatches"
    return "<h2>The pipeline</h2>" + svg(shown, title, unit="s")
