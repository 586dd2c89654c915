"""The common style of all pictures of this project; matplotlib without a screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 900, 500, 100  # pixels
LEAST_HEIGHT = 200
IN_A_ROW = 6  # entries of a legend


def blank(height: float = HEIGHT) -> Figure:
    """Return a figure of that many pixels, to be drawn on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = WIDTH / DPI, max(LEAST_HEIGHT, height) / DPI
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(axes: Axes, *, legend_below: bool = False) -> None:
    """Add grid, frame and legend as in all pictures.

    Args:
        legend_below: in one row below all, where the picture has no empty place for it.
    """
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend_below:
        axes.figure.legend(loc="outside lower center", ncols=IN_A_ROW, frameon=False)
    elif axes.has_data():
        axes.legend(frameon=False)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a .png or a .svg, by the name, and its directory where there is none; returns the path."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return Path(path)
