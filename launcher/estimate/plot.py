"""A picture of an estimate: a bar for each rank, by component."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.estimate.answer import Estimate
from launcher.monitor.plot import DPI, HEIGHT, WIDTH, finish

COLORS = {
    "parameters": "#1f4e8c",
    "gradients": "#5b8cc4",
    "optimizer": "#9db8d9",
    "buffers": "#c9c9c9",
    "activations": "#c8501e",
}
GIB = 1 << 30


def plot(ranks: Sequence[Estimate], path: str | Path, *, title: str, device: int | None = None) -> Path:
    """Draw who holds what at the peak of each rank, as PNG or SVG by the file's ending; return the path.

    Args:
        device: bytes: a line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places, below = range(len(ranks)), [0.0] * len(ranks)
    for name, color in COLORS.items():
        heights = [getattr(one.at_peak, name) / GIB for one in ranks]
        axes.bar(places, heights, 0.6, bottom=below, color=color, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if device is not None:
        axes.axhline(device / GIB, color="black", linestyle="--", linewidth=1, label="the device")
    axes.set_xticks(list(places), [f"rank {one.rank}" for one in ranks])
    axes.set_title(title)
    axes.set_ylabel("GiB at the peak")
    finish(axes)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return Path(path)
