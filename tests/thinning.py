"""What `make test` leaves to `make test-all`: cases marked `full`, and what a pairwise covering leaves out.

    @pytest.mark.pairwise
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("accumulation", [1, 3])

keeps as many of the 16 cases as it takes for every two values of two axes to meet in one of them: 8. An axis is a
parameter of the test; a parameter that is a dataclass is as many axes as it has fields.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any

import pytest

Axes = dict[str, Hashable]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run what `make test` leaves out, too")
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where ranks train; default: cpu"
    )
    parser.addoption("--rest", action="store_true", help="run only what `make test` leaves out")


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of `items` what this run does not run."""
    if config.getoption("--full"):
        return
    left, rest = _left_out(items), config.getoption("--rest")
    # A case that was asked for by its name is run.
    asked = {argument for argument in config.invocation_params.args if "::" in str(argument)}
    chosen = {item for item in items if item.nodeid in asked or (item.nodeid in left) == rest}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _left_out(items: Sequence[pytest.Item]) -> set[str]:
    """What `make test` does not run."""
    left = {item.nodeid for item in items if item.get_closest_marker("full")}
    for product in _products(items):
        chosen = covering([_axes(item.callspec.params) for item in product])
        left |= {item.nodeid for index, item in enumerate(product) if index not in chosen}
    return left


def covering(rows: Sequence[Axes]) -> set[int]:
    """Indices of few rows that have every pair of values that occurs in any of them.

    Greedy: always the row with the most pairs that are still missing, the first one of equals. A row with one axis
    only is a pair of itself.
    """
    pairs = [_pairs(row) for row in rows]
    missing = set().union(*pairs) if pairs else set()
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _pairs(row: Axes) -> set[Any]:
    named = sorted(row.items(), key=lambda axis: axis[0])
    return set(combinations(named, 2)) or {tuple(named)}


def _products(items: Sequence[pytest.Item]) -> list[list[Any]]:
    """The cases of every test that is marked `pairwise`."""
    products: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("pairwise") and hasattr(item, "callspec"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(products.values())


def _axes(parameters: dict[str, Any]) -> Axes:
    found: Axes = {}
    for name, value in parameters.items():
        if is_dataclass(value) and not isinstance(value, type):
            found |= {f"{name}.{field.name}": repr(getattr(value, field.name)) for field in fields(value)}
        else:
            found[name] = repr(value)
    return found
