"""The memory calculator of the docs shows the estimator's numbers."""

from __future__ import annotations

import json
import re

import pytest

from launcher.config import load
from tests.pages import calculator_page as page
from tests.pages.packages import ROOT

SAMPLE = [
    ("Llama 3.2 1B", 8, 4096, "ZeRO 1", False),
    ("Qwen3 0.6B", 1, 2048, "ZeRO 2, optimizer in host memory", True),
    ("Mixtral 8x7B", 64, 8192, "ZeRO 3", True),
]


@pytest.mark.parametrize(("model", "ranks", "length", "way", "again"), SAMPLE)
def test_the_numbers_are_the_estimators(model: str, ranks: int, length: int, way: str, again: bool) -> None:
    sizes = json.loads(page.FILE.read_text())["models"][model]["mib"]
    row = sizes[page.RANKS.index(ranks)][page.LENGTHS.index(length)][list(page.WAYS).index(way)]
    assert row[again] == page.mib(model, ranks, length, way, recomputed=again)


def test_the_file_is_of_today() -> None:
    """Check everything except the sizes, which are sampled above."""
    content = json.loads(page.FILE.read_text())
    assert list(content["models"]) == list(page.MODELS) and content["cards"] == page.cards()
    assert [tuple(content[key]) for key in ("parts", "ranks", "lengths")] == [
        page.PARTS,
        page.RANKS,
        page.LENGTHS,
    ]
    for way in content["ways"]:
        assert way["json"] == [page.json_of(way["name"], recomputed=again) for again in (False, True)]
        load(way["json"][1])


def test_the_page_finds_what_it_reads() -> None:
    script = (ROOT / "docs" / "javascripts" / "calculator.js").read_text()
    known = {"cards", "models", "parts", "ranks", "ways", "lengths"}
    assert set(re.findall(r"data\.(\w+)", script)) == known
    assert "javascripts/calculator.js" in (ROOT / "docs" / "calculator.md").read_text()
