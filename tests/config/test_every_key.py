"""Every key of DeepSpeed 0.19.8 has a verdict, and every implemented key has a test that shows its effect.

`keys.tsv` lists the keys: dotted path, importance to users, and what DeepSpeed itself does with it.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.config import Config, Section
from launcher.config.conversions import converted_paths
from launcher.config.schema import implemented_paths, known_at

HERE = Path(__file__).parent
with (HERE / "keys.tsv").open() as file:
    KEYS = {row["key"]: row for row in csv.DictReader(file, delimiter="\t")}
IMPLEMENTED = set(implemented_paths(Config))
CONVERTED = {path.partition(":")[0] for path, _ in converted_paths()}


def without_effect(cls: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key that is accepted without effect."""
    yield from (prefix + key for key in cls.without_effect)
    for key in cls.model_fields:
        for member in cls.sections_of(key):
            yield from without_effect(member, f"{prefix}{cls.step_of(key)}.")


WITHOUT_EFFECT = set(without_effect(Config))


def verdict(path: str) -> str:
    """Return one of implemented, without effect, converted and refused."""
    if path in WITHOUT_EFFECT:
        return "without effect"
    if path in IMPLEMENTED:
        return "implemented"
    parts = path.replace("[]", ".[]").split(".")
    if any(".".join(parts[:end]) in CONVERTED for end in range(1, len(parts) + 1)):
        return "converted"
    return "refused" if known_at(tuple(parts)) is not None else "unknown"


def test_every_key_has_a_verdict() -> None:
    assert [path for path in KEYS if verdict(path) == "unknown"] == []


def marks_of(function: Any) -> Iterator[Any]:
    """Return the marks of a test function, including those of its parameters."""
    for mark in getattr(function, "pytestmark", []):
        yield mark
        if mark.name == "parametrize":
            for parameters in mark.args[1]:
                yield from getattr(parameters, "marks", ())


def marked() -> Iterator[str]:
    """Return the keys in all `pytest.mark.key(...)` of the tests."""
    root = HERE.parents[1]
    for file in (HERE.parent).rglob("test_*.py"):
        if file != Path(__file__) and "mark.key(" in file.read_text():
            module = importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
            for value in vars(module).values():
                for mark in marks_of(value):
                    yield from mark.args if mark.name == "key" else ()


SHOWN = frozenset(marked())


def test_markers_name_keys_that_exist() -> None:
    for path in SHOWN:
        plain = path.removesuffix(".*")
        assert plain in IMPLEMENTED or plain in KEYS or plain in CONVERTED, path


def is_shown(path: str) -> bool:
    """Return whether a key is marked, itself or as a member of a section marked with `.*`."""
    parts = path.split(".")
    return path in SHOWN or any(".".join([*parts[:end], "*"]) in SHOWN for end in range(1, len(parts)))


LEAVES = [path for path in KEYS if not any(other.startswith(f"{path}.") for other in KEYS)]
NEEDED = [path for path in LEAVES if path in IMPLEMENTED and KEYS[path]["tier"] in ("must", "should")]


def test_every_implemented_key_has_a_test_of_its_effect() -> None:
    assert [path for path in NEEDED if not is_shown(path) and path not in WITHOUT_EFFECT] == []
