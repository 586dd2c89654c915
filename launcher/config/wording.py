"""pydantic's complaints in plain words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import ErrorDetails

from launcher.config.problems import show
from launcher.config.suggest import nearest

_MUST_BE: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda ctx: "a whole number",
    "int_from_float": lambda ctx: "a whole number",
    "float_type": lambda ctx: "a number",
    "finite_number": lambda ctx: "a finite number",
    "bool_type": lambda ctx: "true or false",
    "string_type": lambda ctx: "a text in quotes",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "greater_than": lambda ctx: f"more than {ctx['gt']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
    "literal_error": lambda ctx: f"one of {ctx['expected'].replace(chr(39), chr(34))}",
}


def in_words(error: ErrorDetails) -> tuple[str, str | None]:
    """(what is wrong, what to write instead) of one pydantic error."""
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "complaint":
        return context["what"], context["fix"]
    if kind == "missing":
        return "required key is missing", "add it"
    if kind not in _MUST_BE:
        return f"{show(given)} is not valid: {error['msg']}", None
    fix = "delete it to have the default" if kind == "greater_than_equal" else _nearly(given, kind, context)
    return f"must be {_MUST_BE[kind](context)}, not {show(given)}", fix


def _nearly(given: Any, kind: str, context: dict[str, Any]) -> str | None:
    """A way out for a word that is nearly one of the allowed ones."""
    if not isinstance(given, str) or kind != "literal_error" or "'" not in context["expected"]:
        return None
    choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ",").split(",")]
    near = nearest(given, choices)
    return f'did you mean "{near}"?' if near else None
