"""Hand-written configurations: the result for each, and for each with a typo."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config import Config
from launcher.config.problems import Path as KeyPath
from launcher.config.problems import distance, dotted, is_comment
from launcher.config.root import inspect
from launcher.config.schema import implemented_paths, known_paths
from launcher.config.source import read
from tests.config.test_typos import LETTERS, typo

DIRECTORY = Path(__file__).parent / "configs"
TAKEN = ("trainer_auto", "with_comments", "watched", "stage3_small_cluster", "years_ago")
REFUSED = {
    "wrong_places": {
        "offload_optimizer",
        "stage",
        "bf16.gradient_clipping",
        "zero_optimization.stage3_max_live_paramters",
        "optimizer.adam_w_mode",
        "learning_rate",
    },
    "template": {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization.stage",
        "fp16.enabled",
    },
    "nvme_nowhere": {
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_optimizer.device",
        "fp16.enabled",
    },
}


def test_every_file_has_a_verdict() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.json")} == {*TAKEN, *REFUSED}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    examined = inspect(DIRECTORY / f"{name}.json")
    assert examined.problems == ()
    assert bool(examined.document.conversions) == (name == "years_ago")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_all_reasons_at_once(name: str) -> None:
    examined = inspect(DIRECTORY / f"{name}.json")
    assert {dotted(examined.document.written(problem.path)) for problem in examined.problems} == REFUSED[name]
    assert all(problem.what and (problem.fix or name == "template") for problem in examined.problems)


def keys(tree: dict[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in tree.items():
        if not is_comment(key, value):
            yield (*path, key)
            if isinstance(value, dict):
                yield from keys(value, (*path, key))


TREES = {name: read(DIRECTORY / f"{name}.json").tree for name in TAKEN}
PLACES = [(name, path) for name, tree in TREES.items() for path in keys(tree)]
VALID = {*implemented_paths(Config), *known_paths()}


def misspelt(name: str, path: KeyPath, wrong: str) -> dict[str, Any]:
    tree = copy.deepcopy(TREES[name])
    parent = tree
    for key in path[:-1]:
        parent = parent[str(key)]
    members = {wrong if key == path[-1] else key: value for key, value in parent.items()}
    parent.clear()
    parent.update(members)
    return tree


def is_a_key(path: KeyPath, wrong: str) -> bool:
    """Return whether the misspelt key is another valid key."""
    names = (wrong, f"stage3_{wrong}")
    siblings = {dotted((*path[:-1], name)) for name in names}
    return not siblings.isdisjoint(VALID) or is_comment(wrong, "")


@settings(max_examples=300)
@given(
    st.sampled_from(PLACES),
    st.sampled_from(["swap", "delete", "replace", "insert"]),
    st.integers(0, 60),
    st.sampled_from(LETTERS),
)
def test_a_typo_at_any_depth_of_a_valid_file_is_an_error_at_its_path(
    place: tuple[str, KeyPath], edit: str, at: int, letter: str
) -> None:
    name, path = place
    wrong = typo(str(path[-1]), edit, at, letter)
    if wrong in ("", path[-1]) or is_a_key(path, wrong):
        return
    examined = inspect(misspelt(name, path, wrong))
    here = (*path[:-1], wrong)
    written = [examined.document.written(problem.path) for problem in examined.problems]
    assert any(found[: len(here)] == here or here[: len(found)] == found for found in written), written


def test_the_right_key_is_suggested() -> None:
    dice, right, total = random.Random(1), 0, 0
    for name, path in PLACES:
        for edit in ("swap", "delete", "replace", "insert"):
            key = str(path[-1])
            wrong = typo(key, edit, dice.randrange(60), dice.choice(LETTERS))
            obsolete = dotted(path) not in VALID
            if wrong in ("", key) or is_a_key(path, wrong) or obsolete or distance(wrong, key) > 1:
                continue
            problems = inspect(misspelt(name, path, wrong)).problems
            total += 1
            right += any(problem.suggestion == dotted(path) for problem in problems)
    assert total > 250
    assert right / total >= 0.95, f"{right} of {total}"
