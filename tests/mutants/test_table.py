"""The faults can still be put where they belong."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.table import MUTANTS

PACKAGE = Path(__file__).resolve().parents[2] / "launcher"


def test_every_fault_has_its_place() -> None:
    for name, mutant in MUTANTS.items():
        text = (PACKAGE / mutant.file).read_text()
        compile(mutant.applied(text), name, "exec")


def test_there_are_sixty() -> None:
    assert len(MUTANTS) == 60
