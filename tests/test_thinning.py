"""What `make test` skips: pairs of values stay covered, and a case requested by name is run."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from tests.thinning import covering

pytest_plugins = ["pytester"]

FILE = """
from dataclasses import dataclass
import pytest

@dataclass(frozen=True)
class Case:
    stage: int
    tied: bool

@pytest.mark.pairwise
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", [Case(stage, tied) for stage in range(4) for tied in (False, True)])
def test_product(world, case):
    pass

@pytest.mark.full
def test_slow():
    pass

def test_quick():
    pass
"""


def test_every_pair_is_covered_by_few() -> None:
    axes = {
        "stage": range(4),
        "world": (1, 2, 4),
        "tied": (False, True),
        "dtype": ("fp32", "bf16"),
        "acc": (1, 3),
    }
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    chosen = [rows[index] for index in covering(rows)]
    assert 12 <= len(chosen) <= 16  # stages x worlds is the least
    for one, other in combinations(axes, 2):
        assert {(row[one], row[other]) for row in chosen} == set(product(axes[one], axes[other]))


def test_a_single_axis_stays_whole() -> None:
    assert covering([{"name": name} for name in "abc"]) == {0, 1, 2}
    assert covering([]) == set()


@pytest.mark.parametrize(("flags", "passed"), [([], 9), (["--rest"], 9), (["--full"], 18)])
def test_few_and_rest_are_all(pytester: pytest.Pytester, flags: list[str], passed: int) -> None:
    ended(pytester, *flags).assert_outcomes(passed=passed, deselected=18 - passed)


def test_what_is_asked_for_by_name_is_run(pytester: pytest.Pytester) -> None:
    ended(pytester, "test_cases.py::test_slow").assert_outcomes(passed=1)


def ended(pytester: pytest.Pytester, *flags: str) -> pytest.RunResult:
    root = Path(__file__).parents[1]
    pytester.makeconftest(
        "from tests.thinning import deselect, pytest_addoption\n"
        "def pytest_collection_modifyitems(config, items): deselect(config, items)"
    )
    pytester.makeini("[pytest]\nmarkers = full: left out\n    pairwise: thinned")
    pytester.makepyfile(test_cases=FILE)
    pytester.syspathinsert(root)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *flags)
