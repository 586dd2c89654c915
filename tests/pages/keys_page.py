"""docs/config.md: every key of the JSON, made from the schema."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from launcher.config.conflicts import ACROSS, WITHIN
from launcher.config.conversions import converted_paths
from launcher.config.known_keys import Known, known_keys
from launcher.config.optimizer import TYPES
from launcher.config.root import Config
from launcher.config.rules import Rule
from launcher.config.section import Section

INTRODUCTION = """\
# Configuration keys

<!-- Made by `python -m tests.pages`; edit the docstrings in launcher/config/ instead. -->

Every key of a DeepSpeed JSON, as DeepSpeed 0.19.8 reads it, and how launcher handles it. `launch check DS.json` reports
the same for one file, key by key; `launch check --explain` shows the value of every `"auto"` and every default.

- The file is read as Hjson, as in DeepSpeed: comments (`//`, `#`, `/* */`), missing and trailing commas, and unquoted
  strings are allowed. A string under a key named for comments (`_comment`, `//`, `note`, ...) is a comment.
- 5e8 is an integer, and a number may be a string (`"1e-3"`). `true` and `false` may be written as 1 and 0, and as
  `"true"`, `"yes"`, `"on"` and their opposites.
- Any value may be `"auto"`: the run sets it, or the default is used. `null` means the default.
- An unknown key is an error that names the nearest valid one. Invalid values and contradictory combinations
  ([the table](#combinations)) are errors too. All errors of a file are reported at once, each with line and column.
- A top-level key that resembles no known key counts as the script's own: a warning names it, and launcher ignores it.
- Obsolete keys are [converted](#obsolete-keys), and each conversion is reported; `launch check --migrate` writes the
  new file.
- A feature that is [not implemented](#keys-that-are-refused) is refused if it is enabled, and accepted if it is off.
"""


def field_docs(cls: type[Section]) -> dict[str, str]:
    """Return field -> the docstring under it."""
    docs: dict[str, str] = {}
    for parent in reversed([base for base in cls.__mro__ if issubclass(base, Section)]):
        docs |= _own_docs(parent)
    return {name: docs[name] for name in cls.model_fields if name in docs}


@cache
def _own_docs(cls: type[Section]) -> dict[str, str]:
    """Those of the fields that its own body declares. Kept: to find a class in its file, inspect parses all of it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        line.target.id: inspect.cleandoc(str(after.value.value))
        for line, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def keys_page() -> str:
    """The text of docs/config.md."""
    parts = [INTRODUCTION, *_sections(Config, ""), _combinations(), _obsolete(), _refused()]
    return "\n".join(parts)


def _sections(cls: type[Section], path: str) -> Iterator[str]:
    """Write a table of the plain keys of a section, then its member sections."""
    title = f"`{path}`" if path else "Top level"
    yield f"## {title}\n\n{_paragraphs(cls)}\n"
    docs = field_docs(cls)
    plain = [key for key in cls.model_fields if cls.items_of(key) or not cls.sections_of(key)]
    if plain:
        yield "| key | type | default | meaning | difference from DeepSpeed |\n|---|---|---|---|---|"
        for key in plain:
            yield _row(cls, key, docs[key])
        yield ""
    for key in cls.model_fields:
        members = cls.sections_of(key)
        for member in members:
            inner = f"{path}.{cls.step_of(key)}" if path else cls.step_of(key)
            variant = member.__name__.removesuffix("Params") if len(members) > 1 else ""
            yield from _sections(member, f"{inner} ({variant})" if variant else inner)
    if path == "optimizer":
        yield _optimizers()


def _paragraphs(cls: type[Section]) -> str:
    text = " ".join((cls.__doc__ or "").split())
    return "Keys of the file itself; the sections follow." if cls is Config else text


def _row(cls: type[Section], key: str, doc: str) -> str:
    info = cls.model_fields[key]
    other = [old for old, new in cls.aliases.items() if new == key]
    name = f"`{key}`" + "".join(f", `{old}`" for old in other)
    default = "required" if info.is_required() else f"`{_json(info.get_default(call_default_factory=True))}`"
    differs = cls.differs.get(key, "")
    if key in cls.without_effect:
        differs = f"no effect: {cls.without_effect[key]}"
    cells = [name, _type(info.annotation), default, " ".join(doc.split()), differs]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(kind: Any) -> str:
    """Say a Python annotation in the words of JSON."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part) for part in inside if part is not type(None))
    if origin in (tuple, list):
        parts = [part for part in inside if part is not Ellipsis]
        return f"list of {len(parts)} numbers" if len(parts) > 1 else f"list of {_plural(parts[0])}"
    if origin is dict or kind is dict or (isinstance(kind, type) and issubclass(kind, Section)):
        return "object"
    return {int: "integer", float: "number", bool: "boolean", str: "string"}.get(kind, "any")


def _plural(kind: Any) -> str:
    """Say the same of the items of a list."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " and ".join(_plural(part) for part in inside)
    return f"lists of {_plural(inside[0])}" if origin is tuple else f"{_type(kind)}s"


def _json(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple | frozenset) else value)


def _optimizers() -> str:
    rows = [
        f"| `{name}` | {kind.lr:g} | {', '.join(f'`{key}`' for key in kind.keywords)} |"
        for name, kind in TYPES.items()
    ]
    head = "| type | default `lr` | keywords of `params` |\n|---|---|---|"
    return "\n".join(["### Optimizer types\n", head, *rows, ""])


class _Name(str):
    """A key in capital letters, in the place of its value."""

    def __format__(self, _: str) -> str:
        return str(self)


def _combinations() -> str:
    lines = [
        "## Combinations\n",
        "These combinations are refused before the run starts.\n",
        "| keys | what | instead |",
        "|---|---|---|",
    ]
    for rule in (*ACROSS, *WITHIN):
        if isinstance(rule, Rule):
            names = [_Name(key.rpartition(".")[2].upper()) for key in rule.keys]
            keys = ", ".join(f"`{key}`" for key in dict.fromkeys(rule.keys))
            lines.append(f"| {keys} | {rule.what.format(*names)} | {rule.fix.format(*names)} |")
    return "\n".join([*lines, ""])


def _obsolete() -> str:
    lines = ["## Obsolete keys\n", "Converted to their replacements; each conversion is reported.\n"]
    lines += ["| written | read as |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{old}` | {new} |" for old, new in converted_paths()), ""])


def _refused() -> str:
    lines = [
        "## Keys that are refused\n",
        "These known keys are errors unless they have the neutral value; those without an effect are accepted.\n",
    ]
    lines += ["| key | purpose | neutral value | status |", "|---|---|---|---|"]
    status = {
        "later": "not implemented",
        "old": "DeepSpeed dropped it",
        "ignored": "DeepSpeed ignores it",
        "idle": "accepted, no effect",
    }
    for path, known in _leaves(known_keys(), ""):
        neutral = ", ".join(f"`{_json(value)}`" for value in known.neutral)
        fix = f"; {known.fix}" if known.fix else ""
        lines.append(f"| `{path}` | {known.words}{fix} | {neutral} | {status[known.status]} |")
    return "\n".join([*lines, ""])


def _leaves(known: Known, prefix: str) -> Iterator[tuple[str, Known]]:
    for key, child in known.children.items():
        path = f"{prefix}{key}"
        if child.words:
            yield path, child
        yield from _leaves(child, f"{path}.")
