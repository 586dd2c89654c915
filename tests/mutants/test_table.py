"""Every fault can still be inserted into the current code."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_has_its_place() -> None:
    for name, mutant in MUTANTS.items():
        text = (ROOT / "launcher" / mutant.file).read_text()
        compile(mutant.applied(text), name, "exec")
        assert all((ROOT / part).exists() for part in mutant.nearby), name


def test_there_are_sixty_or_more() -> None:
    assert len(MUTANTS) >= 60
