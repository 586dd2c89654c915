"""The problems of a configuration, reported all at once, each with its position and a fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from launcher.errors import ConfigError, printable, shortened

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MOST = 40  # problems listed in a message

NoteKind: TypeAlias = Literal["converted", "differs", "no effect", "comment", "foreign"]

Path: TypeAlias = tuple[str | int, ...]
"""Path from the root of the JSON to a value: keys, and indices of list items."""


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        path: the key with the mistake.
        what: what is wrong, without the key's name.
        fix: what to write instead.
        suggestion: dotted path of the key that was probably meant.
    """

    path: Path
    what: str
    fix: str | None = None
    suggestion: str | None = None


@dataclass(frozen=True)
class Note:
    """A remark on a key that is not an error.

    Attributes:
        path: the key.
        kind: "converted" for an obsolete spelling, "no effect" for a key that does nothing here, "comment"
            for text that is not a key, "foreign" for a key that a script reads itself, else "differs".
        what: the remark, without the key's name.
    """

    path: Path
    kind: NoteKind
    what: str

    def __str__(self) -> str:
        link = " is obsolete: " if self.kind == "converted" else ": "
        return f"{dotted(self.path)}{link}{self.what}"


class ConfigProblems(ConfigError):
    """Reports every problem of one configuration; `problems` lists them.

    `described` returns the position and the name of a key, as written.
    """

    def __init__(self, name: str, problems: Iterable[Problem], described: Callable[[Path], str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{name} has {count} problem{'s' if count > 1 else ''}:"]
        for problem in self.problems[:MOST]:
            lines.append(f"  {described(problem.path)}: {problem.what}")
            if problem.fix:
                lines.append(f"      fix: {problem.fix}")
        if count > MOST:
            lines.append(f"  and {count - MOST:,} more")
        super().__init__("\n".join(lines))


def dotted(path: Path) -> str:
    """Format a path as `optimizer.params.betas[1]`; the root is `(the whole config)`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else "." * bool(text) + (shortened(part) or '""')
    return printable(text) or "(the whole config)"


_COMMENT = re.compile(r"(//|#).*|[_/#]*(comments?|notes?|description|readme)_?\d*", re.IGNORECASE | re.DOTALL)


def is_comment(key: str, value: Any) -> bool:
    """Return whether a member is a comment, that is, text under a key such as `_comment` or `//`."""
    texts = value if isinstance(value, list) else [value]
    return bool(_COMMENT.fullmatch(key)) and all(isinstance(text, str) for text in texts)


def show(value: Any) -> str:
    """Format a value as in JSON, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'the string "{printable(shortened(value, 40))}"'
    if isinstance(value, dict):
        return "an object {...}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(show(item) for item in value[:4])
        return f"the list [{inside}{', ...' if len(value) > 4 else ''}]"
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a number with {len(str(abs(value)))} digits"
    if isinstance(value, int | float):
        return repr(value)
    return f"a Python {type(value).__name__}"


def in_json(value: Any) -> str:
    """Format a value like `show`, except that a string is only quoted."""
    return f'"{printable(shortened(value, 40))}"' if isinstance(value, str) else show(value)


def distance(one: str, other: str) -> int:
    """Count the edits between two words: insert, delete or replace a letter, or swap two adjacent ones.

    Source: optimal string alignment, the restricted form of Damerau (1964).
    """
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i] + [0] * len(other)
        for j, wanted in enumerate(other, start=1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                row[j] = min(row[j], before[j - 2] + 1)
        before, above = above, row
    return above[-1]


def plain(key: str) -> str:
    """Normalize the case, dashes, spaces and surrounding whitespace of a key."""
    return key.strip().lower().replace("-", "_").replace(" ", "_")


def nearest(key: str, candidates: Iterable[str], *, furthest: int | None = None) -> str | None:
    """Return the candidate with the fewest edits from `key`; None if none is close enough.

    Args:
        key: the word as written.
        candidates: valid words.
        furthest: maximum number of edits; by default about a third of the letters, at least 1.
    """
    word = plain(key)
    limit = max(1, len(word) // 3) if furthest is None else furthest
    best: tuple[int, int, int] | None = None
    winner: str | None = None
    for candidate in candidates:
        other = plain(candidate)
        if abs(len(word) - len(other)) > limit:
            continue
        edits = distance(word, other)
        # Ties go to the longer common prefix: typos are mostly in the middle and at the end.
        rank = (edits, -_common_start(word, other), abs(len(word) - len(other)))
        if edits <= limit and (best is None or rank < best):
            best, winner = rank, candidate
    return winner


def _common_start(one: str, other: str) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


_MUST_BE: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda ctx: "a whole number",
    "int_from_float": lambda ctx: "a whole number",
    "float_type": lambda ctx: "a number",
    "finite_number": lambda ctx: "a finite number",
    "bool_type": lambda ctx: "true or false",
    "string_type": lambda ctx: "a quoted string",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
    "literal_error": lambda ctx: f"one of {ctx['expected'].replace(chr(39), chr(34))}",
}


def in_words(error: ErrorDetails) -> tuple[str, str | None]:
    """Return (what is wrong, what to write instead) for one pydantic error."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "complaint":
        return context["what"], context["fix"]
    if kind == "missing":
        return "required key is missing", "add it"
    if kind not in _MUST_BE:
        return f"{show(given)} is not valid: {error['msg']}", None
    fix = "delete it to use the default" if kind == "greater_than_equal" else _nearly(given, kind, context)
    return f"must be {_MUST_BE[kind](context)}, not {show(given)}", fix


def _nearly(given: Any, kind: str, context: dict[str, Any]) -> str | None:
    """Suggest the allowed word that is closest to a wrong one."""
    if not isinstance(given, str) or kind != "literal_error" or "'" not in context["expected"]:
        return None
    choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ",").split(",")]
    near = nearest(given, choices)
    return f'did you mean "{near}"?' if near else None
