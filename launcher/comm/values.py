"""Python values in JSON and back: tuples stay tuples, and keys that are no strings stay what they are.

Schedules of torch count milestones by whole numbers, and callers' states hold tuples; plain JSON would give back
strings and lists, and a schedule would never meet its milestone again.
"""

from __future__ import annotations

from typing import Any

PAIRS, TUPLE = "__pairs__", "__tuple__"


def encode(value: Any) -> Any:
    """Return `value` made of what JSON can hold; what it cannot hold otherwise is left for json to refuse."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not {PAIRS, TUPLE} & value.keys():
            return {key: encode(inner) for key, inner in value.items()}
        return {PAIRS: [[encode(key), encode(inner)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [encode(inner) for inner in value]}
    if isinstance(value, list):
        return [encode(inner) for inner in value]
    return value


def decode(value: Any) -> Any:
    """Return what `encode` was given; a subclass of dict or tuple comes back as a plain one."""
    if isinstance(value, dict):
        if value.keys() == {PAIRS}:
            return {decode(key): decode(inner) for key, inner in value[PAIRS]}
        if value.keys() == {TUPLE}:
            return tuple(decode(inner) for inner in value[TUPLE])
        return {key: decode(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    return value
