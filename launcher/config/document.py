"""A configuration as written, and edits to it that are recorded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.config.problems import Note, Path, Problem, dotted
from launcher.config.section import as_switch


@dataclass
class Document:
    """A configuration as written.

    Attributes:
        name: name to use in messages: the file's name, or "config" for a dict.
        tree: nested dicts and lists of plain values.
        places: (line, column) of each key and list item, both from 1; empty for a dict.
        problems: errors found by the reader itself (a key written twice, a value that is not JSON).
        conversions: obsolete keys that were rewritten.
        origins: path of a rewritten key -> the path that was written.
        comments: the lines at which comments begin, from 1: `//`, `#` and `/* */`.
    """

    name: str
    tree: dict[str, Any]
    places: dict[Path, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    conversions: list[Note] = field(default_factory=list)
    origins: dict[Path, Path] = field(default_factory=dict)
    comments: list[int] = field(default_factory=list)

    def place(self, path: Path) -> tuple[int, int]:
        """Return (line, column) of a key, or of the nearest enclosing section that is written; (0, 0) if none
        is."""
        ends = range(len(path), 0, -1)
        return next((self.places[path[:end]] for end in ends if path[:end] in self.places), (0, 0))

    def where(self, path: Path) -> str:
        """Return `file:line:column` of a key, or only the name if its position is unknown."""
        line, column = self.place(path)
        return f"{self.name}:{line}:{column}" if line else self.name

    def holds(self, path: Path) -> bool:
        """Return whether a key is in the tree."""
        tree: Any = self.tree
        for part in path:
            if not isinstance(tree, dict) or part not in tree:
                return False
            tree = tree[part]
        return True

    def written(self, path: Path) -> Path:
        """Return the path that the user wrote for a current path."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return path

    def described(self, path: Path) -> str:
        """Return `file:line:column key`, followed by the current key if the written one is obsolete."""
        written = self.written(path)
        read = f" (now {dotted(path)})" if written != path else ""
        return f"{self.where(path)} {dotted(written)}{read}"


class Rewriter:
    """Edits a copy of a document. Paths are dotted; each change is reported under the path that was written."""

    def __init__(self, document: Document) -> None:
        self.document = replace(
            document,
            tree=copy.deepcopy(document.tree),
            places=dict(document.places),
            problems=list(document.problems),
            conversions=[],
            origins={},
        )

    def _parent(self, path: Path) -> dict[str, Any] | None:
        node: Any = self.document.tree
        for key in path[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else None

    def has(self, path: str) -> bool:
        """Return whether the key is written."""
        return self.document.holds(_keys(path))

    def get(self, path: str) -> Any:
        """Return the value of a key; None if it is not written."""
        keys = _keys(path)
        parent = self._parent(keys)
        return None if parent is None else parent.get(str(keys[-1]))

    def switch(self, path: str) -> bool | None:
        """Return the value of a key as a boolean, in any accepted spelling; None if it is not one."""
        return as_switch(self.get(path))

    def put(self, path: str, value: Any, what: str) -> None:
        """Replace the value of a key that is written."""
        keys = _keys(path)
        parent = self._parent(keys)
        assert parent is not None
        parent[str(keys[-1])] = value
        self._tell(keys, what)

    def drop(self, path: str, what: str | None) -> None:
        """Delete a key. With `what` None nothing is reported: its members have been reported one by one."""
        self._delete(_keys(path))
        self._tell(_keys(path), what)

    def take(self, path: str, what: str) -> Any:
        """Delete a key and return its value; None if it is not written."""
        value = self.get(path)
        if self.has(path):
            self.drop(path, what)
        return value

    def move(self, old: str, new: str, what: str) -> None:
        """Move a key to its new path; it is a problem if both are written with different values."""
        value = self.get(old)
        if self.get(new) is not None and self.get(new) != value:
            self.problem(old, f"is an old name of `{new}`, and both are written", f"keep `{new}`")
            self._delete(_keys(old))
        else:
            self.replace(old, new, value, what)

    def replace(self, old: str, new: str, value: Any, what: str) -> None:
        """Replace the key `old` with `value` at `new`."""
        before, after = _keys(old), _keys(new)
        source = self._parent(before)
        target: dict[str, Any] = self.document.tree
        for key in after[:-1]:
            inner = target.get(str(key))
            if not isinstance(inner, dict):
                inner = target[str(key)] = {}
            target = inner
        if target is source:  # keep the key order of a migrated file
            pairs = [
                (after[-1] if key == before[-1] else key, item)
                for key, item in source.items()
                if key != after[-1]
            ]
            source.clear()
            source.update({str(key): item for key, item in pairs})
        else:
            self._delete(before)
        target[str(after[-1])] = value
        self.same_place(before, after)
        self._tell(before, what)

    def same_place(self, old: Path, new: Path) -> None:
        """Give `new` and its members the positions of `old`, so that problems are reported where the user
        wrote them."""
        self.document.origins[new] = old
        for path, place in list(self.document.places.items()):
            if path[: len(old)] == old:
                now = (*new, *path[len(old) :])
                self.document.places[now], self.document.origins[now] = place, path

    def problem(self, path: str, what: str, fix: str) -> None:
        """Record a problem that rewriting cannot fix."""
        self.document.problems.append(Problem(_keys(path), what, fix))

    def _delete(self, path: Path) -> None:
        parent = self._parent(path)
        if parent is not None:
            parent.pop(str(path[-1]), None)

    def _tell(self, path: Path, what: str | None) -> None:
        if what:
            self.document.conversions.append(Note(self.document.written(path), "converted", what))


def _keys(path: str) -> Path:
    return tuple(path.split("."))
