"""Text of a JSON file -> tree of plain values, with the line and column of every key.

DeepSpeed reads its JSON with Hjson, so people's files have comments (`//`, `#`, `/* */`) and trailing
commas. This reader takes those and otherwise keeps to JSON; a key written twice is a problem, not a winner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config.problems import Note, Problem, dotted
from launcher.config.problems import Path as KeyPath
from launcher.errors import ConfigError, shortened
from launcher.files import read_small

_BLANK = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\s,:\[\]{}\"'#]+")
_STRING_END = re.compile(r'["\\\n]')
_WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    "Infinity": float("inf"),
    "inf": float("inf"),
    "-Infinity": float("-inf"),
}
_NO_VALUE = object()
MOST_DEEP = 50  # brackets in brackets
MOST_VALUES = 2000  # keys and list items; the largest configurations have some hundreds
LONGEST_NUMBER = 400  # digits; what is longer is no number of anything
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "TRUE": "true", "FALSE": "false"}


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


class _Parser:
    """Recursive descent over the text; `at` is the offset of the next character."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self.found = Document(name=name, tree={})

    def document(self) -> Document:
        if self.peek() != "{":
            raise self.error("the config must be a JSON object", "start the file with `{`")
        self.found.tree = self.object(())
        if self.peek():
            raise self.error("there is more text after the closing `}`", "delete it, or check the braces")
        return self.found

    def peek(self) -> str:
        """Skips blanks and comments and returns the next character, "" at the end."""
        blank = _BLANK.match(self.text, self.at)
        self.at = blank.end() if blank else self.at
        if self.text.startswith("/*", self.at):
            raise self.error("a `/*` comment is never closed", "write `*/` at its end")
        return self.text[self.at : self.at + 1]

    def place(self, at: int) -> tuple[int, int]:
        """Line and column, from 1, of an offset."""
        low, high = 0, len(self.line_starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.line_starts[middle] <= at else (low, middle)
        return low + 1, at - self.line_starts[low] + 1

    def error(self, what: str, fix: str, at: int | None = None) -> ConfigError:
        line, column = self.place(self.at if at is None else at)
        return ConfigError(f"this is not valid JSON: {what}", where=f"{self.name}:{line}:{column}", fix=fix)

    def value(self, path: KeyPath) -> Any:
        character = self.peek()
        if character in ("{", "["):
            if len(path) >= MOST_DEEP:
                raise self.error(f"brackets are nested more than {MOST_DEEP} deep", "write a configuration")
            return self.object(path) if character == "{" else self.array(path)
        if character == '"':
            return self.string()
        return self.number_or_word(path)

    def object(self, path: KeyPath) -> dict[str, Any]:
        members: dict[str, Any] = {}
        opened, self.at = self.at, self.at + 1
        while self.peek() != "}":
            self.more("}", opened)
            start = self.at
            if self.text[start] != '"':
                raise self.error("a key is expected here", 'write keys in double quotes: `"key": value`')
            key = self.string()
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
            self.comma("}")
        self.at += 1
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
        """Takes one comma; none is needed before the closing bracket, and one there is fine."""
        after = self.at
        following = self.peek()
        if following == ",":
            self.at += 1
        elif following and following in "]}" and following != close:
            raise self.error(f"`{close}` must come before `{following}`", f"write `{close}` here")
        elif following and following != close:
            raise self.error("a comma is missing here", "write `,` after the value", at=after)

    def string(self) -> str:
        start, self.at = self.at, self.at + 1
        parts: list[str] = []
        while True:
            end = _STRING_END.search(self.text, self.at)
            if end is None or end.group() == "\n":
                raise self.error("the text is not closed on its line", 'write `"` at its end', at=start)
            parts.append(self.text[self.at : end.start()])
            self.at = end.end()
            if end.group() == '"':
                return "".join(parts)
            parts.append(self.escape())

    def escape(self) -> str:
        """The character after a backslash; pairs of \\u surrogates make one character."""
        code, self.at = self.text[self.at : self.at + 1], self.at + 1
        if code in _ESCAPES and code:
            return _ESCAPES[code]
        digits = self.text[self.at : self.at + 4]
        if code == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            self.at += 4
            first = int(digits, 16)
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, self.at)
            if 0xD800 <= first < 0xDC00 and low:
                self.at = low.end()
                return chr(0x10000 + ((first - 0xD800) << 10) + (int(low.group(1), 16) - 0xDC00))
            if 0xD800 <= first < 0xE000:
                what = f"`\\u{digits}` is half of a character"
                raise self.error(what, "write both halves, or the character itself", at=self.at - 6)
            return chr(first)
        raise self.error(f"`\\{code}` means nothing in JSON", "write `\\\\` for a backslash", at=self.at - 2)

    def number_or_word(self, path: KeyPath) -> Any:
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            if len(number.group()) > LONGEST_NUMBER:
                what = f"a number has {len(number.group()):,} digits"
                raise self.error(what, "write a smaller one", at=number.start())
            exact = number.group(1) is None and number.group(2) is None
            return int(number.group()) if exact else float(number.group())
        word = _WORD.match(self.text, self.at)
        if word is None:
            found = self.text[self.at : self.at + 1] or "the end of the file"
            raise self.error(f"a value is expected here, not {found}", "write a value")
        if word.group() in _WORDS:
            self.at = word.end()
            return _WORDS[word.group()]
        # Reading goes on, so that all placeholders of a template are told at once.
        self.at = word.end()
        brief = shortened(word.group())
        what, fix = f"`{brief}` is not a value", f'write the value meant, or text: `"{brief}"`'
        if word.group() in _PYTHON_WORDS:
            what, fix = f"`{word.group()}` is Python, not JSON", f"write `{_PYTHON_WORDS[word.group()]}`"
        self.found.problems.append(Problem(path, what, fix))
        return _NO_VALUE
