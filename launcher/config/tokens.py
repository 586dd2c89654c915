"""The words of a JSON file, as Hjson has them: blanks and comments, texts with and without quotes, numbers.

DeepSpeed reads its JSON with Hjson (hjson.github.io), whose texts may be without quotes, in single ones or,
over several lines, in three. A text without quotes goes to the end of its line. Where that takes in a comma, a bracket
or a comment, somebody meant something else, and it is a problem here.
"""

from __future__ import annotations

import re
from typing import Any

from launcher.config.readings import MOST_DIGITS
from launcher.errors import ConfigError, shortened

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
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "TRUE": "true", "FALSE": "false"}


class NotAValueError(Exception):
    """A word that is no value. Reading can go on after it.

    Attributes:
        what, fix: for a problem.
    """

    def __init__(self, what: str, fix: str) -> None:
        self.what, self.fix = what, fix


class Tokens:
    """A text read from left to right; `at` is the offset of the next character."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.line_starts = [0] + [match.end() for match in re.finditer("\n", text)]

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

    def key(self) -> str:
        """A key, in quotes or not."""
        if self.text[self.at : self.at + 1] in _STRING_END:
            return self.string()
        word = _KEY.match(self.text, self.at)
        if word is None:
            raise self.error("a key is expected here", 'write `"key": value`')
        self.at = word.end()
        return word.group()

    def at_key(self) -> bool:
        """Whether a key and its colon come next."""
        before = self.at
        try:
            self.key()
            return self.peek() == ":"
        except ConfigError:
            return False
        finally:
            self.at = before

    def string(self) -> str:
        """A text in quotes of any kind."""
        if self.text.startswith(_THREE, self.at):
            return self.lines()
        start, self.at = self.at, self.at + 1
        quote, parts = self.text[start], list[str]()
        while True:
            end = _STRING_END[quote].search(self.text, self.at)
            if end is None or end.group() == "\n":
                what = "the text is not closed on its line"
                raise self.error(what, f"write `{quote}` at its end", at=start)
            parts.append(self.text[self.at : end.start()])
            self.at = end.end()
            if end.group() == quote:
                return "".join(parts)
            parts.append(self.escape())

    def lines(self) -> str:
        """A text of several lines in three quotes. Its indentation counts from the column where it is opened."""
        start, indent = self.at, self.place(self.at)[1] - 1
        end = self.text.find(_THREE, start + 3)
        if end < 0:
            raise self.error(f"the text is never closed by `{_THREE}`", f"write `{_THREE}` at its end")
        self.at = end + 3
        first, *rest = self.text[start + 3 : end].replace("\r", "").split("\n")
        rest = [line[len(line[:indent]) - len(line[:indent].lstrip()) :] for line in rest]
        lines = [*([first] if first.strip() else []), *rest]
        return "\n".join(lines if rest == [] or rest[-1].strip() else lines[:-1])

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

    def plain(self) -> Any:
        """A number, a word that means something, or a text without quotes. Raises NotAValueError after what is none."""
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            if len(number.group()) > MOST_DIGITS:
                what = f"a number has {len(number.group()):,} digits"
                raise self.error(what, "write a smaller one", at=number.start())
            exact = number.group(1) is None and number.group(2) is None
            return int(number.group()) if exact else float(number.group())
        found = _WORD.match(self.text, self.at)
        if found is None:
            character = self.text[self.at : self.at + 1] or "the end of the file"
            raise self.error(f"a value is expected here, not {character}", "write a value")
        first = _KEY.match(self.text, self.at)
        assert first is not None
        if first.group() in _WORDS and _AFTER_WORD.match(self.text, first.end()):
            self.at = first.end()
            return _WORDS[first.group()]
        return self.unquoted(found)

    def unquoted(self, found: re.Match[str]) -> str:
        """The text without quotes that begins here, `found` being what comes before a comma or bracket."""
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
        raise NotAValueError(f"`{brief}` is not a value", f'write the value meant, or text: `"{brief}"`')
