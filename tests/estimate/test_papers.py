"""The estimator compared with papers, and the generated page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.estimates import CASES, RANKS, activations, as_printed, bubbles, zero_states

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "estimates.md").read_text()
ZERO = {  # GB of a rank by stage, 7.5 B parameters: Rajbhandari et al., arXiv 1910.02054, table 1
    1: ("120", "120", "120", "120"),
    4: ("120", "52.5", "41.3", "30"),
    16: ("120", "35.6", "21.6", "7.5"),
    64: ("120", "31.4", "16.6", "1.88"),
    256: ("120", "30.4", "15.4", "0.47"),
    1024: ("120", "30.1", "15.1", "0.12"),
}


def test_model_states_are_those_of_the_paper_to_the_digit() -> None:
    assert {ranks: tuple(as_printed(zero_states(s, ranks)) for s in range(4)) for ranks in RANKS} == ZERO
    for ranks, cells in ZERO.items():
        assert f"| {ranks} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("kind", ["", "sequence", "recomputed"])
def test_a_block_keeps_what_the_paper_says(kind: str) -> None:
    formula, traced = activations(1024, 16, 4, kind)
    assert traced == pytest.approx(formula, rel=0.02)
    assert f"| {formula / 1e6:.2f} | {traced / 1e6:.2f} |" in PAGE


def test_bubbles_are_the_closed_forms() -> None:
    for name, closed, simulated in (*bubbles(4, 8), *bubbles(8, 32)):
        assert simulated == pytest.approx(closed), name


@pytest.mark.parametrize("name", CASES)
def test_predicted_peaks_are_those_measured(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    _, _, measured, predicted, *_ = row.split("|")
    assert float(predicted) == pytest.approx(float(measured), rel=0.05)
