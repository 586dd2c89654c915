"""A plot of an estimate: one bar per rank, by component."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.estimate.answer import Estimate
from launcher.monitor.figure import blank, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "parameters": "#1f4e8c",
    "gradients": "#5b8cc4",
    "optimizer": "#9db8d9",
    "buffers": "#c9c9c9",
    "activations": "#c8501e",
}
GIB = 1 << 30
MARGIN, BAR = 170, 50  # pixels


def memory_bars(ranks: Sequence[Estimate], *, title: str = "", device: float | None = None) -> Figure:
    """Return a bar chart of each rank's memory at its peak, by component.

    Args:
        device: bytes of the device, drawn as a line.
    """
    figure = blank(MARGIN + BAR * len(ranks))
    axes = figure.add_subplot()
    names, left = [f"rank {one.rank}" for one in ranks], [0.0] * len(ranks)
    for component, color in COLORS.items():
        sizes = [getattr(one.at_peak, component) / GIB for one in ranks]
        axes.barh(names, sizes, 0.6, left=left, color=color, label=component)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    if device is not None:
        axes.axvline(device / GIB, color="black", linestyle="--", linewidth=1, label="the device")
    axes.invert_yaxis()
    axes.set_title(title)
    axes.set_xlabel("GiB at the peak of a step")
    finish(axes, legend_below=True)
    return figure
