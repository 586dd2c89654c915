"""Draws a timeline as SVG: one lane per rank, one box per action; measured below predicted."""

from __future__ import annotations

from html import escape

from launcher.pipeline.schedules.actions import ActionKind
from launcher.pipeline.timeline.simulate import Timeline

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, LEFT, RIGHT = 1120, 74, 20
LANE, GAP, TOP = 30, 4, 36  # heights of a box, between boxes, and of title and legend
AXIS, CAPTION, BETWEEN = 24, 20, 18
INK, PALE, GROUND = "#1f2933", "#7b8794", "#f0f2f5"
COLOURS = {
    ActionKind.FORWARD: "#3b7dd8",
    ActionKind.BACKWARD: "#2f9e6e",
    ActionKind.INPUT: "#2f9e6e",
    ActionKind.WEIGHT: "#e08e2b",
}
MEANING = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "input grad",
    ActionKind.WEIGHT: "weight grad",
}
LIGHTEST = 0.55  # how far the last chunk's colour is blended towards white
DIGIT = 6.4  # width of a digit in a box


def svg(timeline: Timeline, title: str, other: Timeline | None = None, unit: str = "") -> str:
    """Return the SVG text.

    Args:
        timeline: a simulated or measured timeline.
        title: text above the picture.
        other: a measured timeline, drawn below on the same time axis; the first is then labelled as
            predicted.
        unit: unit of the time axis, for example "s".
    """
    panels = [("", timeline)] if other is None else [("predicted: ", timeline), ("measured: ", other)]
    longest = max(shown.total for _, shown in panels)
    scale = (WIDTH - LEFT - RIGHT) / longest if longest else 1.0
    body = [_text(LEFT, 20, title, size=15, weight=600), *_legend([shown for _, shown in panels])]
    top = TOP
    for called, shown in panels:
        body.append(_text(LEFT, top + 14, called + _caption(shown), size=12, colour=INK))
        top += CAPTION
        body += _lanes(shown, top, scale)
        top += shown.stages * (LANE + GAP)
        body += _axis(longest, top, scale, unit)
        top += AXIS + BETWEEN
    height = top - BETWEEN + 4
    head = (
        f'<svg xmlns="{NAMESPACE}" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *body, "</svg>", ""])


def _caption(timeline: Timeline) -> str:
    peaks = " ".join(str(peak) for peak in timeline.peak_held)
    part = "" if timeline.chunks == 1 else f" (each 1/{timeline.chunks} of a rank's layers)"
    return f"bubble {timeline.bubble:.1%} of the time · peak activations held per rank: {peaks}{part}"


def _lanes(timeline: Timeline, top: int, scale: float) -> list[str]:
    drawn = []
    for rank, spans in enumerate(timeline.spans):
        y = top + rank * (LANE + GAP)
        drawn.append(_text(LEFT - 10, y + LANE / 2 + 4, f"rank {rank}", size=12, anchor="end"))
        drawn.append(
            f'<rect x="{LEFT}" y="{y}" width="{timeline.total * scale:.2f}" height="{LANE}" fill="{GROUND}"/>'
        )
        chunks = {stage: chunk for chunk, stage in enumerate(sorted({span.action.stage for span in spans}))}
        for span in spans:
            action, chunk = span.action, chunks[span.action.stage]
            x, width = LEFT + (span.start - timeline.start) * scale, (span.end - span.start) * scale
            drawn.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE}" '
                f'fill="{_colour(action.kind, chunk, timeline.chunks)}" stroke="white" '
                f'stroke-width="{min(1.0, width / 8):.2f}"><title>{action}: {span.start - timeline.start:.6g} to '
                f"{span.end - timeline.start:.6g}</title></rect>"
            )
            number = str(action.microbatch)
            if width > DIGIT * len(number) + 3:
                colour = "white" if chunk == 0 else INK
                drawn.append(
                    _text(x + width / 2, y + LANE / 2 + 4, number, size=11, colour=colour, anchor="middle")
                )
    return drawn


def _legend(timelines: list[Timeline]) -> list[str]:
    """Draw the legend to the right of the title: a box for each kind and chunk in the picture."""
    kinds = {span.action.kind for shown in timelines for spans in shown.spans for span in spans}
    chunks = timelines[0].chunks
    drawn: list[str] = []
    x = float(WIDTH - RIGHT)
    for kind in sorted(kinds, key=list(COLOURS).index, reverse=True):
        label = f"{kind} {MEANING[kind]}"
        x -= 6.4 * len(label) + 4
        drawn.append(_text(x, 20, label, size=12))
        x -= 4
        for chunk in reversed(range(chunks)):
            x -= 16
            colour = _colour(kind, chunk, chunks)
            drawn.append(f'<rect x="{x:.1f}" y="9" width="14" height="14" fill="{colour}"/>')
        x -= 14
    if chunks > 1:
        drawn.append(_text(x, 20, "chunks from dark to light", size=12, colour=PALE, anchor="end"))
    return drawn


def _axis(longest: float, top: int, scale: float, unit: str) -> list[str]:
    step = _nice(longest / 20)
    drawn = []
    for tick in range(int(longest / step + 1e-9) + 1):
        x = LEFT + tick * step * scale
        drawn.append(f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 5}" stroke="{PALE}"/>')
        drawn.append(_text(x, top + 17, f"{tick * step:.6g}", size=10, colour=PALE, anchor="middle"))
    name = f"time ({unit})" if unit else "time"
    return [*drawn, _text(LEFT - 10, top + 17, name, size=10, colour=PALE, anchor="end")]


def _nice(wanted: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... (and their tenths, ...) that is at least `wanted`."""
    if wanted <= 0:
        return 1.0
    power = 1.0
    while power > wanted:
        power /= 10
    while power * 10 <= wanted:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted)


def _colour(kind: ActionKind, chunk: int, chunks: int) -> str:
    """Return the colour of an action kind, lighter for later chunks."""
    white = LIGHTEST * chunk / max(1, chunks - 1)
    parts = (int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _text(
    x: float, y: float, text: str, *, size: int, colour: str = INK, weight: int = 400, anchor: str = "start"
) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{bold}>'
        f"{escape(text)}</text>"
    )
