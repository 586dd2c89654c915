"""The loss curve: a plot of the expected size that contains the curves."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from launcher.monitor.plot import curve, plot_loss, smoothed


def write(path: Path, losses: list[float], eval_every: int = 0) -> Path:
    records = []
    for step, loss in enumerate(losses, start=1):
        extra = {"eval_loss": loss + 0.1} if eval_every and step % eval_every == 0 else {}
        records.append({"step": step, "loss": loss, **extra})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the saved figures."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: object, **kwargs: object) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_a_picture_of_900_by_500_with_loss_smoothed_loss_and_eval_points(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    losses = [5.0 - i / 20 for i in range(60)]
    png = plot_loss(
        write(tmp_path / "m.jsonl", losses, eval_every=20),
        tmp_path / "out" / "loss.png",
        title="tiny, stage 2",
    )
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (900, 500)
    (axes,) = drawn[0].axes
    raw, smooth, evaluated = axes.lines
    assert list(raw.get_ydata()) == losses and len(smooth.get_ydata()) == 60
    assert list(evaluated.get_xdata()) == [20, 40, 60]
    assert (axes.get_title(), axes.get_xlabel()) == ("tiny, stage 2", "optimizer step")
    assert "loss" in axes.get_ylabel()


@pytest.mark.parametrize("losses", [[], [3.0], [float("nan")] * 3])
def test_runs_of_no_or_one_step_give_a_picture_too(tmp_path: Path, losses: list[float]) -> None:
    assert (
        plot_loss(write(tmp_path / "m.jsonl", losses), tmp_path / "loss.png", title="t").stat().st_size > 1000
    )


def test_losses_that_are_no_numbers_are_left_out() -> None:
    steps, values = curve(
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": 1}], "loss"
    )
    assert steps.tolist() == [1, 3] and values.tolist() == [2, 1]


def test_smoothing_keeps_a_line_a_line_and_does_not_lag() -> None:
    assert np.allclose(smoothed(np.full(50, 3.0)), 3.0)
    falling = np.linspace(5, 1, 301)
    assert np.allclose(smoothed(falling)[100:200], falling[100:200], atol=1e-3)
    noise = falling + np.random.default_rng(0).normal(0, 0.3, 301)
    assert np.abs(smoothed(noise) - falling).mean() < 0.4 * np.abs(noise - falling).mean()
