"""Keeps what `datasets` and our cache write inside the test's own directory."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    root: Path = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "hf-datasets")
    monkeypatch.setenv("LAUNCHER_CACHE", str(root / "launcher-cache"))
