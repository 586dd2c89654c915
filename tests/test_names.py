"""One name has one meaning in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.pages.packages import FILES, PACKAGE


def types_of(text: str) -> Iterator[str]:
    """Return the public classes and type aliases that a module defines."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Name) and not target.id.isupper():
                yield target.id


def test_no_type_has_the_name_of_another_one() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for name in types_of((PACKAGE / path).read_text()):
            if name[0].isupper():
                places[name].append(str(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
