"""The common style of all plots in this project, drawn by matplotlib without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 900, 500, 100  # pixels
LEAST_HEIGHT = 200
IN_A_ROW = 6  # legend entries per row


def blank(height: float = HEIGHT) -> Figure:
    """Return an empty figure with a height in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = WIDTH / DPI, max(LEAST_HEIGHT, height) / DPI
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(axes: Axes, *, legend_below: bool = False) -> None:
    """Add the grid, frame and legend.

    Args:
        legend_below: put the legend below the plot, if there is no empty space inside.
    """
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend_below:
        axes.figure.legend(loc="outside lower center", ncols=IN_A_ROW, frameon=False)
    elif axes.has_data():
        axes.legend(frameon=False)


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as .png or .svg, creating the directory if needed; return the path."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    return Path(path)
