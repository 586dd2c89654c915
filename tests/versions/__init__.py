"""Versions of dependencies that are tested (`python -m tests.versions`), and tests that require certain versions."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TRANSFORMERS = Version(version("transformers"))


def pinned(package: str) -> str:
    """Return the version in constraints.txt, which `make test` uses."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2].split()[0] for line in lines if line.startswith(f"{package}=="))


writes_on_main_process_only = pytest.mark.skipif(
    Version("5.15") > TRANSFORMERS,
    reason="before 5.15 save_pretrained(is_main_process=False) wrote files, too",
)
of_the_table = pytest.mark.skipif(
    Version(pinned("transformers")) != TRANSFORMERS, reason="docs/models.md is about the pinned version"
)
