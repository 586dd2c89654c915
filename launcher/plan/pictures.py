"""Plots of a plan: time against memory, also as SVG for HTML pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.monitor.figure import blank, finish
from launcher.plan.choose import Choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30


def pareto(choices: Sequence[Choice], limit: float) -> Figure:
    """Return a plot of step time against memory, with choices labeled by mesh, and the Pareto front."""
    figure = blank()
    axes = figure.add_subplot()
    peaks = [choice.peak / GIB for choice in choices]
    seconds = [choice.time.total for choice in choices]
    axes.plot(peaks, seconds, "o", color="#9db8d9", label="fastest layout of a mesh")
    front = _front(sorted(zip(peaks, seconds, strict=True)))
    axes.plot(*zip(*front, strict=True), "o-", color="#1f4e8c", label="Pareto front") if front else None
    for choice, x, y in zip(choices, peaks, seconds, strict=True):
        tp, pp, dp, cp, ep = choice.layout.mesh
        shared = (f" cp {cp}" if cp > 1 else "") + (f" ep {ep}" if ep > 1 else "")
        axes.annotate(
            f"tp {tp} pp {pp} dp {dp}{shared}", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7
        )
    axes.axvline(limit / GIB, color="#1f2933", linestyle="--", linewidth=1, label="the device")
    axes.set_xlabel("peak GiB per device")
    axes.set_ylabel("seconds per step")
    finish(axes)
    return figure


def as_svg(figure: Figure) -> str:
    """Return the figure as an `<svg>` element for HTML."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front of (memory, time) points sorted by memory."""
    front: list[tuple[float, float]] = []
    for x, y in points:
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front
