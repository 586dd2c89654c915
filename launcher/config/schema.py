"""What keys there are: every path of the schema, and of what is known and not implemented."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from launcher.config.known_keys import Known, known_keys
from launcher.config.problems import Path
from launcher.config.section import Section
from launcher.config.values import as_switch


@cache
def implemented_paths(root: type[Section]) -> tuple[str, ...]:
    """Dotted path of every key that can be written, sections included."""
    return tuple(dict.fromkeys(_paths(root, "")))


def _paths(cls: type[Section], prefix: str) -> Iterator[str]:
    for key in cls.model_fields:
        yield prefix + key
        for member in cls.sections_of(key):
            yield from _paths(member, f"{prefix}{cls.step_of(key)}.")


@cache
def known_paths() -> tuple[str, ...]:
    """Dotted path of every DeepSpeed key that is not implemented."""
    return tuple(_known(known_keys(), ""))


def _known(node: Known, prefix: str) -> Iterator[str]:
    for key, child in node.children.items():
        if key != "*":
            yield prefix + key
            yield from _known(child, f"{prefix}{key}.")


def differs_at(root: type[Section], tree: Any, path: Path) -> str | None:
    """How the key at `path` of `tree` differs from DeepSpeed; None if it does not, or is no implemented key."""
    cls: type[Section] | None = root
    whole = tree
    for part in path[:-1]:
        if cls is None or not isinstance(tree, dict):
            return None
        cls, tree = cls.section_of(cls.spelling(str(part)), tree), tree.get(str(part))
    if cls is None or not isinstance(tree, dict) or as_switch(tree.get("enabled")) is False:
        return None  # what is off differs in nothing
    key = cls.spelling(str(path[-1]))
    shows = cls.differs_where.get(key)
    return None if shows and not shows(tree.get(str(path[-1])), whole) else cls.differs.get(key)


def keys_written(cls: type[Section], tree: Any, path: Path = ()) -> set[Path]:
    """Paths of the keys of `tree` in the schema's own spelling, sections included."""
    found: set[Path] = set()
    for key, value in tree.items():
        name = cls.spelling(key)
        member = cls.section_of(name, tree)
        found.add((*path, name))
        if member is not None and isinstance(value, dict):
            found |= keys_written(member, value, (*path, name))
    return found


def known_at(path: Path) -> Known | None:
    """The key of DeepSpeed's at `path` that is not implemented."""
    known: Known | None = known_keys()
    for part in path:
        known = known.child(str(part)) if known else None
    return known
