"""Pictures of a plan: memory by component, time against memory; as SVG for pages, or as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.estimate.answer import Estimate
from launcher.monitor.plot import DPI, HEIGHT, WIDTH, finish
from launcher.plan.choose import Choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "parameters": "#3b7dd8",
    "gradients": "#2f9e6e",
    "optimizer": "#e08e2b",
    "buffers": "#7b8794",
    "activations": "#c8501e",
}
GIB = 2**30


def memory_bars(estimates: Sequence[Estimate], limit: float) -> Figure:
    """A bar a rank, at its peak, under the line of what the device has."""
    figure = _figure(0.6 + 0.5 * len(estimates))
    axes = figure.add_subplot()
    names = [f"rank {each.rank}" for each in estimates]
    left = [0.0] * len(estimates)
    for component, colour in COLOURS.items():
        sizes = [getattr(each.at_peak, component) / GIB for each in estimates]
        axes.barh(names, sizes, left=left, color=colour, label=component)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.axvline(limit / GIB, color="#1f2933", linestyle="--", linewidth=1, label="the device")
    axes.invert_yaxis()
    axes.set_xlabel("GiB at the peak of a step")
    finish(axes)
    return figure


def pareto(choices: Sequence[Choice], limit: float) -> Figure:
    """Seconds of a step against bytes of the device; each choice by its mesh, the front joined."""
    figure = _figure(HEIGHT / DPI)
    axes = figure.add_subplot()
    peaks = [choice.peak / GIB for choice in choices]
    seconds = [choice.time.total for choice in choices]
    axes.plot(peaks, seconds, "o", color="#9db8d9", label="fastest of a mesh")
    front = _front(sorted(zip(peaks, seconds, strict=True)))
    axes.plot(
        *zip(*front, strict=True), "o-", color="#1f4e8c", label="none is better in both"
    ) if front else None
    for choice, x, y in zip(choices, peaks, seconds, strict=True):
        tp, pp, dp = choice.layout.mesh
        axes.annotate(
            f"tp {tp} pp {pp} dp {dp}", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7
        )
    axes.axvline(limit / GIB, color="#1f2933", linestyle="--", linewidth=1, label="the device")
    axes.set_xlabel("GiB of a device at the peak")
    axes.set_ylabel("seconds of a step")
    finish(axes)
    return figure


def as_svg(figure: Figure) -> str:
    """The picture as an element of a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def save(figure: Figure, path: str | Path) -> None:
    """Write a .svg or a .png, by the name."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points sorted by memory those that are faster than all with less."""
    front: list[tuple[float, float]] = []
    for x, y in points:
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, max(2.0, height)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
