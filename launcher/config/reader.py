"""Parses the text of a JSON file into a tree of plain values, with the line and column of every key.

DeepSpeed reads its JSON with Hjson (hjson.github.io), so existing files have comments (`//`, `#`, `/* */`),
trailing or missing commas, and strings without quotes, in single quotes or, over several lines, in triple
quotes. This reader accepts all of them, but a key that is written twice is a problem. A string without quotes
extends to the end of its line. If that would include a comma, a bracket or a comment, it is most likely a
mistake and is reported as a problem.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launcher.config.document import Document
from launcher.config.problems import Path as KeyPath
from launcher.config.problems import Problem, dotted
from launcher.config.section import MOST_DIGITS
from launcher.errors import ConfigError, shortened
from launcher.files import read_small

_NO_VALUE = object()
MOST_DEEP = 50  # maximum nesting of brackets
MOST_VALUES = 2000  # keys and list items; the largest configurations have a few hundred
_BLANK = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?(?![\w.])")
_KEY = re.compile(r"[^\s,:\[\]{}\"'#]+")
_WORD = re.compile(r"[^\s,:\[\]{}\"'#][^\n,\[\]{}\"'#]*")
_AFTER_WORD = re.compile(r"[ \t\r]*(?:[,\[\]{}#\n]|//|/\*|$)")
_LINE = re.compile(r"[^\n]*")
_NO_TEXT = re.compile(r"[,\[\]{}\"'#]|:\s|\s//|/\*")
_STRING_END = {'"': re.compile(r'["\\\n]'), "'": re.compile(r"['\\\n]")}
_THREE = "'''"
_WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    "Infinity": float("inf"),
    "inf": float("inf"),
    "-Infinity": float("-inf"),
}
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NOT_A_CONFIG = "check that this is a DeepSpeed configuration"
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "TRUE": "true", "FALSE": "false"}


class NotAValueError(Exception):
    """A word that is not a value. Parsing can continue after it.

    Attributes:
        what, fix: as in `Problem`.
    """

    def __init__(self, what: str, fix: str) -> None:
        self.what, self.fix = what, fix


class Tokens:
    """Reads a text from left to right; `at` is the offset of the next character."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.line_starts = [0] + [match.end() for match in re.finditer("\n", text)]
        self.comments: set[int] = set()  # offset of the first comment between two tokens

    def peek(self) -> str:
        """Skip whitespace and comments and return the next character, "" at the end."""
        blank = _BLANK.match(self.text, self.at)
        if blank and (comments := blank.group().lstrip(" \t\r\n\ufeff")):
            self.comments.add(blank.end() - len(comments))
        self.at = blank.end() if blank else self.at
        if self.text.startswith("/*", self.at):
            raise self.error("a `/*` comment is never closed", "write `*/` at its end")
        return self.text[self.at : self.at + 1]

    def place(self, at: int) -> tuple[int, int]:
        """Return (line, column) of an offset, both from 1."""
        low, high = 0, len(self.line_starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.line_starts[middle] <= at else (low, middle)
        return low + 1, at - self.line_starts[low] + 1

    def error(self, what: str, fix: str, at: int | None = None) -> ConfigError:
        line, column = self.place(self.at if at is None else at)
        return ConfigError(f"this is not valid JSON: {what}", where=f"{self.name}:{line}:{column}", fix=fix)

    def key(self) -> str:
        """Read a key, with or without quotes."""
        if self.text[self.at : self.at + 1] in _STRING_END:
            return self.string()
        word = _KEY.match(self.text, self.at)
        if word is None:
            raise self.error("expected a key here", 'write `"key": value`')
        self.at = word.end()
        return word.group()

    def at_key(self) -> bool:
        """Return whether a key and its colon come next."""
        before = self.at
        try:
            self.key()
            return self.peek() == ":"
        except ConfigError:
            return False
        finally:
            self.at = before

    def string(self) -> str:
        """Read a string in quotes of any kind."""
        if self.text.startswith(_THREE, self.at):
            return self.lines()
        start, self.at = self.at, self.at + 1
        quote, parts = self.text[start], list[str]()
        while True:
            end = _STRING_END[quote].search(self.text, self.at)
            if end is None or end.group() == "\n":
                what = "the string is not closed on its line"
                raise self.error(what, f"write `{quote}` at its end", at=start)
            parts.append(self.text[self.at : end.start()])
            self.at = end.end()
            if end.group() == quote:
                return "".join(parts)
            parts.append(self.escape())

    def lines(self) -> str:
        """Read a string in triple quotes. Indentation counts from the column of the opening quotes."""
        start, indent = self.at, self.place(self.at)[1] - 1
        end = self.text.find(_THREE, start + 3)
        if end < 0:
            raise self.error(f"the string is never closed by `{_THREE}`", f"write `{_THREE}` at its end")
        self.at = end + 3
        first, *rest = self.text[start + 3 : end].replace("\r", "").split("\n")
        rest = [line[len(line[:indent]) - len(line[:indent].lstrip()) :] for line in rest]
        lines = [*([first] if first.strip() else []), *rest]
        return "\n".join(lines if rest == [] or rest[-1].strip() else lines[:-1])

    def escape(self) -> str:
        """Read the character after a backslash; a pair of \\u surrogates is one character."""
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
                what = f"`\\u{digits}` is half of a surrogate pair"
                raise self.error(what, "write both halves, or the character itself", at=self.at - 6)
            return chr(first)
        raise self.error(
            f"`\\{code}` is not an escape sequence of JSON", "write `\\\\` for a backslash", at=self.at - 2
        )

    def plain(self) -> Any:
        """Read a number, a keyword or an unquoted string. Raises NotAValueError for anything else."""
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            if len(number.group()) > MOST_DIGITS:
                what = f"a number has {len(number.group()):,} digits"
                raise self.error(what, "write a smaller number", at=number.start())
            exact = number.group(1) is None and number.group(2) is None
            return int(number.group()) if exact else float(number.group())
        found = _WORD.match(self.text, self.at)
        if found is None:
            character = self.text[self.at : self.at + 1] or "the end of the file"
            raise self.error(f"expected a value here, not {character}", "write a value")
        first = _KEY.match(self.text, self.at)
        assert first is not None
        if first.group() in _WORDS and _AFTER_WORD.match(self.text, first.end()):
            self.at = first.end()
            return _WORDS[first.group()]
        return self.unquoted(found)

    def unquoted(self, found: re.Match[str]) -> str:
        """Read the unquoted string at the current offset; `found` is its part before a comma or bracket."""
        line = _LINE.match(self.text, self.at)
        assert line is not None
        text, word = line.group().strip(), found.group().strip()
        if text != "None" and not _NO_TEXT.search(text):
            self.at = line.end()
            return text
        self.at = found.end()
        brief = shortened(word)
        if word in _PYTHON_WORDS:
            raise NotAValueError(f"`{word}` is Python, not JSON", f"write `{_PYTHON_WORDS[word]}`")
        raise NotAValueError(
            f"`{brief}` is not a value", f'write the intended value, or a string: `"{brief}"`'
        )


def read_file(path: Path, name: str | None = None) -> Document:
    """Read a JSON file. Raises ConfigError if it is missing, unreadable or not JSON."""
    name = name or str(path)
    text = read_small(
        path,
        "the config file",
        where=f"looked in {path.absolute().parent}",
        fix="give the path of a DeepSpeed JSON file, encoded as UTF-8",
    )
    return read_text(text, name)


def read_text(text: str, name: str) -> Document:
    """Parse JSON text; `name` is used in messages. Raises ConfigError on the first syntax error."""
    return _Parser(text, name).document()


class _Parser(Tokens):
    """Recursive-descent parser."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.found = Document(name=name, tree={})

    def document(self) -> Document:
        if self.peek() == "{":
            self.found.tree = self.object(())
        elif self.at_key():  # Hjson: the outermost braces can be left out
            self.found.tree = self.members((), "", self.at)
        else:
            kind = {"": ", but is empty", "[": ", not a list"}.get(self.peek(), "")
            raise self.error(f"the config must be a JSON object{kind}", "start the file with `{`")
        if self.peek():
            raise self.error("unexpected text after the closing `}`", "delete it, or check the braces")
        self.found.comments = [self.place(at)[0] for at in sorted(self.comments)]
        return self.found

    def value(self, path: KeyPath) -> Any:
        character = self.peek()
        if character in ("{", "["):
            if len(path) >= MOST_DEEP:
                raise self.error(f"brackets are nested more than {MOST_DEEP} levels deep", _NOT_A_CONFIG)
            return self.object(path) if character == "{" else self.array(path)
        if character in ('"', "'"):
            return self.string()
        try:
            return self.plain()
        except NotAValueError as wrong:  # continue, to report all placeholders of a template at once
            self.found.problems.append(Problem(path, wrong.what, wrong.fix))
            return _NO_VALUE

    def object(self, path: KeyPath) -> dict[str, Any]:
        opened, self.at = self.at, self.at + 1
        members = self.members(path, "}", opened)
        self.at += 1
        return members

    def members(self, path: KeyPath, close: str, opened: int) -> dict[str, Any]:
        """Read keys and values up to `close`; "" is the end of the text."""
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
        """Record the position of a value."""
        if len(self.found.places) >= MOST_VALUES:
            raise self.error(f"there are more than {MOST_VALUES:,} keys and list items", _NOT_A_CONFIG)
        self.found.places[path] = self.place(at)

    def more(self, close: str, opened: int) -> None:
        """Raise `ConfigError` if the text ends inside a bracket."""
        if self.at >= len(self.text):
            bracket = self.text[opened]
            line, column = self.place(opened)
            raise self.error(
                f"the `{bracket}` at line {line}, column {column} is never closed", f"write `{close}`"
            )

    def comma(self, close: str) -> None:
        """Consume one comma; it is optional before the closing bracket and where `ends` is true."""
        after = self.at
        following = self.peek()
        if following == ",":
            self.at += 1
        elif close and following and following in "]}" and following != close:
            raise self.error(f"`{close}` must come before `{following}`", f"write `{close}` here")
        elif following and following != close and not self.ends(after):
            raise self.error("a comma is missing here", "write `,` after the value", at=after)

    def ends(self, after: int) -> bool:
        """Return whether the value before `after` ends without a comma: with a quote, a bracket or its
        line."""
        return self.text[after - 1] in "\"'}]" or "\n" in self.text[after : self.at]
