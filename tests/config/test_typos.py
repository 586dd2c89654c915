"""A one-edit typo of any key, at any depth, is an error that suggests the intended key."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launcher.config import Config, ConfigProblems, load
from launcher.config.problems import dotted
from launcher.config.schema import implemented_paths, known_paths

PATHS = sorted({*implemented_paths(Config), *known_paths()})
LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"


def typo(key: str, edit: str, at: int, letter: str) -> str:
    at %= len(key)
    if edit == "swap":
        at = min(at, len(key) - 2)
        return key[:at] + key[at + 1] + key[at] + key[at + 2 :] if len(key) > 1 else key
    rest = {"delete": key[at + 1 :], "replace": letter + key[at + 1 :], "insert": letter + key[at:]}
    return key[:at] + rest[edit]


def written(path: str, misspelt: str) -> dict[str, Any]:
    """Return a config with one misspelt key, and the other keys that its section requires."""
    *sections, _ = path.split(".")
    tree: dict[str, Any] = {misspelt: 1}
    for section in reversed(sections):
        tree = {section[:-2]: [tree]} if section.endswith("[]") else {section: tree}
    if sections[:1] == ["optimizer"] and path != "optimizer.type":
        tree["optimizer"]["type"] = "AdamW"
    if sections[:1] == ["scheduler"] and path != "scheduler.type":
        kind = "WarmupCosineLR" if "ratio" in path else "WarmupDecayLR"
        tree["scheduler"]["type"] = kind
        if sections[1:]:
            tree["scheduler"]["params"]["total_num_steps"] = 10
        else:
            tree["scheduler"]["params"] = {"total_num_steps": 10}
    return tree


def outcome(path: str, misspelt: str) -> str | None:
    """Return the suggested path; None if the misspelt key is another valid key."""
    *sections, _ = path.split(".")
    wrong = ".".join([*sections, misspelt]).replace("[]", "[0]")
    siblings = {f"stage3_{misspelt}", misspelt}
    if any(".".join([*sections, name]) in PATHS for name in siblings) or wrong == "bfloat16":
        return None
    try:
        load(written(path, misspelt))
    except ConfigProblems as error:
        problem = next(problem for problem in error.problems if dotted(problem.path) == wrong)
        assert "unknown key" in problem.what
        return (problem.suggestion or "nothing").replace("[0]", "[]")
    raise AssertionError(f"{wrong} was accepted")


edits = st.sampled_from(["swap", "delete", "replace", "insert"])


@given(st.sampled_from(PATHS), edits, st.integers(0, 60), st.sampled_from(LETTERS))
def test_a_typo_is_an_error_at_its_path(path: str, edit: str, at: int, letter: str) -> None:
    misspelt = typo(path.split(".")[-1], edit, at, letter)
    if misspelt and misspelt != path.split(".")[-1]:
        assert outcome(path, misspelt) != ""


def test_the_suggestion_is_right_nearly_always() -> None:
    dice = random.Random(0)
    right = total = 0
    for path in PATHS:
        for edit in ("swap", "delete", "replace", "insert"):
            key = path.split(".")[-1]
            misspelt = typo(key, edit, dice.randrange(60), dice.choice(LETTERS))
            if misspelt in ("", key):
                continue
            suggested = outcome(path, misspelt)
            if suggested is not None:
                total += 1
                right += suggested == path
    assert total > 1500
    assert right / total >= 0.95, f"{right} of {total}"
