"""Text of a JSON file -> tree of plain values, with the line and column of every key.

DeepSpeed reads its JSON with Hjson, so people's files have comments (`//`, `#`, `/* */`), trailing commas and none at
all, and texts without quotes. This reader takes those; a key written twice is a problem, not a winner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config.problems import Note, Problem, dotted
from launcher.config.problems import Path as KeyPath
from launcher.config.tokens import NotAValueError, Tokens
from launcher.errors import shortened
from launcher.files import read_small

_NO_VALUE = object()
MOST_DEEP = 50  # brackets in brackets
MOST_VALUES = 2000  # keys and list items; the largest configurations have some hundreds


@dataclass
class Document:
    """A configuration as it was written.

    Attributes:
        name: what to call it in messages: the file's name, or "config" for a dict.
        tree: nested dicts and lists of plain values.
        places: (line, column) of each key and list item, both from 1; empty for a dict.
        problems: what the reader itself found wrong (a key written twice, a value that is no JSON).
        conversions: obsolete keys that were rewritten.
        origins: path of a rewritten key -> the path that was written.
    """

    name: str
    tree: dict[str, Any]
    places: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    conversions: list[Note] = field(default_factory=list)
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)

    def place(self, path: KeyPath) -> tuple[int, int]:
        """Line and column of a key, or of the nearest section around it that is written; (0, 0) for none."""
        ends = range(len(path), 0, -1)
        return next((self.places[path[:end]] for end in ends if path[:end] in self.places), (0, 0))

    def where(self, path: KeyPath) -> str:
        """`file:line:column` of a key, the name alone when it has no place."""
        line, column = self.place(path)
        return f"{self.name}:{line}:{column}" if line else self.name

    def holds(self, path: KeyPath) -> bool:
        """Whether a key is in the tree."""
        tree: Any = self.tree
        for part in path:
            if not isinstance(tree, dict) or part not in tree:
                return False
            tree = tree[part]
        return True

    def written(self, path: KeyPath) -> KeyPath:
        """The path that the user wrote for one of today's."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return path

    def described(self, path: KeyPath) -> str:
        """`file:line:column key`, and what the key is read as where it is an obsolete one."""
        written = self.written(path)
        read = f" (now {dotted(path)})" if written != path else ""
        return f"{self.where(path)} {dotted(written)}{read}"


def read_file(path: Path, name: str | None = None) -> Document:
    """Reads a JSON file. Raises ConfigError when it is missing, unreadable or not JSON."""
    name = name or str(path)
    text = read_small(
        path,
        "the config file",
        where=f"looked in {path.absolute().parent}",
        fix="give the path of a DeepSpeed-style JSON file, saved as UTF-8",
    )
    return read_text(text, name)


def read_text(text: str, name: str) -> Document:
    """Reads JSON text; `name` stands for it in messages. Raises ConfigError on the first syntax error."""
    return _Parser(text, name).document()


class _Parser(Tokens):
    """Recursive descent over the text."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.found = Document(name=name, tree={})

    def document(self) -> Document:
        if self.peek() == "{":
            self.found.tree = self.object(())
        elif self.at_key():  # Hjson: the outermost braces can be left out
            self.found.tree = self.members((), "", self.at)
        else:
            kind = {"": "empty", "[": "a list"}.get(self.peek(), "no JSON object")
            raise self.error(f"the config is {kind}, and must be a JSON object", "start the file with `{`")
        if self.peek():
            raise self.error("there is more text after the closing `}`", "delete it, or check the braces")
        return self.found

    def value(self, path: KeyPath) -> Any:
        character = self.peek()
        if character in ("{", "["):
            if len(path) >= MOST_DEEP:
                raise self.error(f"brackets are nested more than {MOST_DEEP} deep", "write a configuration")
            return self.object(path) if character == "{" else self.array(path)
        if character in ('"', "'"):
            return self.string()
        try:
            return self.plain()
        except (
            NotAValueError
        ) as wrong:  # reading goes on, so that all placeholders of a template are told at once
            self.found.problems.append(Problem(path, wrong.what, wrong.fix))
            return _NO_VALUE

    def object(self, path: KeyPath) -> dict[str, Any]:
        opened, self.at = self.at, self.at + 1
        members = self.members(path, "}", opened)
        self.at += 1
        return members

    def members(self, path: KeyPath, close: str, opened: int) -> dict[str, Any]:
        """The keys and values up to `close`, "" being the end of the text."""
        members: dict[str, Any] = {}
        while self.peek() != close:
            self.more(close, opened)
            start = self.at
            key = self.key()
            if self.peek() != ":":
                brief = shortened(key)
                raise self.error(f'no `:` after the key "{brief}"', f'write `"{brief}": value`')
            self.at += 1
            here = (*path, key)
            first = self.found.places.get(here)
            self.note(here, start)
            if key in members and first:
                again = f"the key is written twice, first at line {first[0]}"
                self.found.problems.append(Problem(here, again, f"keep one `{dotted(here)}`"))
            value = self.value(here)
            if value is not _NO_VALUE:
                members[key] = value
            self.comma(close)
        return members

    def array(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        opened, self.at = self.at, self.at + 1
        while self.peek() != "]":
            self.more("]", opened)
            here = (*path, len(items))
            self.note(here, self.at)
            value = self.value(here)
            items.append(None if value is _NO_VALUE else value)
            self.comma("]")
        self.at += 1
        return items

    def note(self, path: KeyPath, at: int) -> None:
        """Remember where a value stands."""
        if len(self.found.places) >= MOST_VALUES:
            raise self.error(
                f"there are more than {MOST_VALUES:,} keys and list items", "write a configuration"
            )
        self.found.places[path] = self.place(at)

    def more(self, close: str, opened: int) -> None:
        """Complains when the text ends inside a bracket."""
        if self.at >= len(self.text):
            bracket = self.text[opened]
            line, column = self.place(opened)
            raise self.error(
                f"the `{bracket}` of line {line}, column {column} is never closed", f"write `{close}`"
            )

    def comma(self, close: str) -> None:
        """Takes one comma; none is needed before the closing bracket, after another one or where a line ends."""
        after = self.at
        following = self.peek()
        if following == ",":
            self.at += 1
        elif close and following and following in "]}" and following != close:
            raise self.error(f"`{close}` must come before `{following}`", f"write `{close}` here")
        elif following and following != close and not self.ends(after):
            raise self.error("a comma is missing here", "write `,` after the value", at=after)

    def ends(self, after: int) -> bool:
        """Whether the value before `after` ends without a comma: by a quote, a bracket or its line."""
        return self.text[after - 1] in "\"'}]" or "\n" in self.text[after : self.at]
