"""Shares of cores."""

from __future__ import annotations

import pytest

from launcher.cluster import cores
from launcher.errors import ConfigError


def test_list_of_numbers_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(10)))
    assert cores.parse_core_list("0-3, 8") == [0, 1, 2, 3, 8]


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "5,99"])
def test_wrong_list_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(10)))
    with pytest.raises(ConfigError):
        cores.parse_core_list(text)


def test_shares_are_equal_and_disjoint() -> None:
    assert cores.share_cores([0, 1, 2, 4, 5, 6, 7], 3) == [[0, 1], [2, 4], [5, 6]]
    with pytest.raises(ConfigError, match="2 cores cannot be shared out to 3 ranks"):
        cores.share_cores([0, 1], 3)
