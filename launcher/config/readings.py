"""What else a value may mean: DeepSpeed's own checks take `"true"`, 1, "2" and "1e-3" for what they say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

MOST_DIGITS = 400  # of a number in quotes; what is longer is no number of anything

TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
"""In any case. Those that pydantic takes, with which DeepSpeed checks most sections."""


def readings(value: Any) -> Iterator[Any]:
    """Other values that mean the same as `value`, numbers before switches. A field takes the first that fits it."""
    if isinstance(value, list | tuple):
        numbers = [_number(item) for item in value]
        if any(number is not None for number in numbers):
            yield [item if number is None else number for item, number in zip(value, numbers, strict=True)]
        return
    number = _number(value)
    if number is not None:
        yield number
    switch = as_switch(value)
    if switch is not None and not isinstance(value, bool):
        yield switch


def as_switch(value: Any) -> bool | None:
    """True or False where the value says one of them, be it as 1 or as a text; else None."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    word = value.strip().lower() if isinstance(value, str) else ""
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def _number(value: Any) -> int | float | None:
    """The finite number that a text says, None for anything else."""
    if not isinstance(value, str) or len(value) > MOST_DIGITS:
        return None
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None
