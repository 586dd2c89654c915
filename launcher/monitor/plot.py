"""`loss.png`: the loss curve of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.monitor.figure import blank, finish, save
from launcher.monitor.metrics import is_number, read_metrics


def plot_loss(metrics: str | Path, png: str | Path, *, title: str) -> Path:
    """Draw the loss of each step, smoothed, and the eval losses as a PNG of 900 x 500 pixels; return `png`.

    Args:
        metrics: a `metrics.jsonl`. Steps without a finite loss are omitted from the curve.
        png: path of the image.
        title: title, for instance `llama-10m, ZeRO stage 2, 4 ranks`.
    """
    records = read_metrics(metrics)
    figure = blank()
    axes = figure.add_subplot()
    steps, losses = curve(records, "loss")
    if len(steps):
        raw_label = "loss of the step"
        axes.plot(
            steps,
            losses,
            color="#9db8d9",
            linewidth=1,
            label=raw_label,
            marker="." if len(steps) == 1 else "",
        )
        axes.plot(steps, smoothed(losses), color="#1f4e8c", linewidth=2, label="smoothed")
    eval_steps, eval_losses = curve(records, "eval_loss")
    if len(eval_steps):
        axes.plot(
            eval_steps, eval_losses, "o-", color="#c8501e", markersize=5, linewidth=1, label="eval loss"
        )
    axes.set_title(title)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    finish(axes)
    return save(figure, png)


def curve(records: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps [n] and finite values [n] of the records that have `key`."""
    points = [(record["step"], record[key]) for record in records if is_number(record.get(key))]
    array = np.array(points, dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean [n] of exponential moving averages from the left and from the right, which has no lag.

    Args:
        values: [n].
    """
    span = max(2.0, len(values) / 30)  # span of each average, in steps
    return (_moving_average(values, span) + _moving_average(values[::-1], span)[::-1]) / 2


def _moving_average(values: np.ndarray, span: float) -> np.ndarray:
    """Return the bias-corrected exponential moving average [n] (as in Adam, Kingma & Ba 2015)."""
    decay = 1 - 1 / span
    average, weight = 0.0, 0.0
    result = np.empty(len(values))
    for i, value in enumerate(values):
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result[i] = average / weight
    return result
