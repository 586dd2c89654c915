"""What is wrong with a configuration: all of it at once, each with its place and a way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from launcher.errors import ConfigError, printable, shortened

MOST = 40  # problems in a message

NoteKind: TypeAlias = Literal["converted", "differs", "no effect", "comment", "foreign"]

Path: TypeAlias = tuple[str | int, ...]
"""Way from the root of the JSON to a value: keys, and indices of list items."""


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        path: the key it is about.
        what: the mistake, in plain words, without the key's name.
        fix: what to write instead.
        suggestion: dotted path of the key that was probably meant.
    """

    path: Path
    what: str
    fix: str | None = None
    suggestion: str | None = None


@dataclass(frozen=True)
class Note:
    """Something a person should know of a key though nothing is wrong.

    Attributes:
        path: the key it is about.
        kind: "converted" for an obsolete spelling, "no effect" for a key that does nothing here, "comment" for a text
            that is no key, "foreign" for a key that a script keeps for itself, else "differs".
        what: in plain words, without the key's name.
    """

    path: Path
    kind: NoteKind
    what: str

    def __str__(self) -> str:
        link = " is obsolete: " if self.kind == "converted" else ": "
        return f"{dotted(self.path)}{link}{self.what}"


class ConfigProblems(ConfigError):
    """Every problem of one configuration; `problems` holds them one by one.

    `described` gives place and name of a key, as they were written.
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
    """`zero_optimization.stage`, `optimizer.params.betas[1]`; the root is `(the whole config)`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else "." * bool(text) + (shortened(part) or '""')
    return printable(text) or "(the whole config)"


_COMMENT = re.compile(r"(//|#).*|[_/#]*(comments?|notes?|description|readme)_?\d*", re.IGNORECASE | re.DOTALL)


def is_comment(key: str, value: Any) -> bool:
    """JSON has no comments, so people write a text under `_comment`, `//` and the like."""
    texts = value if isinstance(value, list) else [value]
    return bool(_COMMENT.fullmatch(key)) and all(isinstance(text, str) for text in texts)


def show(value: Any) -> str:
    """A value the way it stands in JSON, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f'the text "{printable(shortened(value, 40))}"'
    if isinstance(value, dict):
        return "an object {...}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(show(item) for item in value[:4])
        return f"the list [{inside}{', ...' if len(value) > 4 else ''}]"
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a number of {len(str(abs(value)))} digits"
    if isinstance(value, int | float):
        return repr(value)
    return f"a Python {type(value).__name__}"
