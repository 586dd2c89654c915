"""Kinds of values: the types of fields, and what else a value may mean.

DeepSpeed's own checks take `"true"`, 1, "2" and "1e-3" for what they say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from launcher.config.problems import show

MOST_DIGITS = 400  # of a number in quotes; what is longer is no number of anything

TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
"""In any case. Those that pydantic takes, with which DeepSpeed checks most sections."""


def readings(value: Any) -> Iterator[Any]:
    """List other values that mean the same as `value`, numbers first. A field takes the first that fits it."""
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
    """Return True or False where the value says one of them, be it as 1 or as a text; else None."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    word = value.strip().lower() if isinstance(value, str) else ""
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def _number(value: Any) -> int | float | None:
    """Return the finite number that a text says, None for anything else."""
    if not isinstance(value, str) or len(value) > MOST_DIGITS:
        return None
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def complaint(what: str, fix: str) -> PydanticCustomError:
    """Return what a validator raises: `what` without the key's name, and what to write instead."""
    return PydanticCustomError("complaint", "{what}", {"what": what, "fix": fix})


def whole(value: Any) -> Any:
    """Read 5e8 as 500000000; everything else is left for the type to refuse."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def lower(value: Any) -> Any:
    """Write a word in small letters; everything else is left for the type to refuse."""
    return value.lower() if isinstance(value, str) else value


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise complaint(f"must be a list of two numbers, not {show(value)}", "write [first, second]")
    return tuple(value)


def wholes(least: int, what: str, example: list[int]) -> Callable[[Any], Any]:
    """Return what checks a list of whole numbers, for a validator."""

    def checked(value: Any) -> Any:
        items = [whole(item) for item in value] if isinstance(value, list | tuple) else []
        right = (isinstance(item, int) and not isinstance(item, bool) and item >= least for item in items)
        if not items or not all(right):
            raise complaint(f"must be a list of {what}, not {show(value)}", f"write for example {example}")
        return tuple(items)

    return checked


LARGEST = 2**63 - 1

WholeNumber = Annotated[int, BeforeValidator(whole), Field(ge=0, le=LARGEST)]
"""A whole number from 0; 5e8 is taken as one."""

Count = Annotated[int, BeforeValidator(whole), Field(ge=1, le=LARGEST)]
"""A whole number from 1; 5e8 is taken as one."""

Pair = Annotated[tuple[float, float], BeforeValidator(_pair)]
"""Two numbers, written as a list."""

WholeNumbers = Annotated[tuple[int, ...], BeforeValidator(wholes(1, "whole numbers from 1", [64, 128]))]
"""Whole numbers from 1, written as a list."""


def null_is_true(value: Any) -> Any:
    """Read null as true."""
    return True if value is None else value


# torch's own names, which DeepSpeed takes too
_SHORT = {
    **dict.fromkeys(("torch.float32", "float32", "float"), "fp32"),
    **dict.fromkeys(("torch.float16", "float16", "half"), "fp16"),
    **dict.fromkeys(("torch.bfloat16", "bfloat16"), "bf16"),
}


def short_name(value: Any) -> Any:
    """ "torch.bfloat16", or that dtype itself -> "bf16"; everything else is left for the type to refuse."""
    value = str(value) if type(value).__name__ == "dtype" else value  # nothing here imports torch
    return _SHORT.get(value, value) if isinstance(value, str) else value


Dtype: TypeAlias = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(short_name)]
"""A dtype by its short name; torch's names are taken as well."""


def _names(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise complaint(f"must be a list of names, not {show(value)}", 'write ["first", "second"]')
    return tuple(value)


Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""A list of names."""


def _rates(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item < float("inf"):
            what = f"must be a number from 0, or a list of one for each param group, not {show(value)}"
            raise complaint(what, "write a number, or [first group's, second group's, ...]")
    if not items:
        raise complaint("is an empty list", "write a number, or one for each param group")
    return tuple(map(float, items)) if isinstance(value, list | tuple) else float(value)


Rate = Annotated[float, Field(ge=0)]
"""A learning rate."""

Rates = Annotated[float | tuple[float, ...], BeforeValidator(_rates)]
"""A learning rate (or momentum) of all param groups, or a list with one for each."""
