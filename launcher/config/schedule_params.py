"""What the keywords of every schedule are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from launcher.config.problems import show
from launcher.config.section import Conflict, Section, complaint


class SchedulerParams(Section):
    """Keywords of a schedule."""


def _numbers(least: float, what: str) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if (
                isinstance(item, bool)
                or not isinstance(item, int | float)
                or not least <= item < float("inf")
            ):
                wrong = (
                    f"must be {what} from {least:g}, or a list of one for each param group, not {show(value)}"
                )
                raise complaint(wrong, f"write {what}, or [first group's, second group's, ...]")
        if not items:
            raise complaint("is an empty list", f"write {what}, or one for each param group")
        return tuple(map(float, items)) if isinstance(value, list | tuple) else float(value)

    return checked


Rate = Annotated[float, Field(ge=0)]
"""A learning rate."""

Rates = Annotated[float | tuple[float, ...], BeforeValidator(_numbers(0.0, "a number"))]
"""A learning rate (or momentum) of all param groups, or a list with one for each."""

PerGroup: TypeAlias = float | tuple[float, ...]


def crossed(low_key: str, low: PerGroup, high_key: str, high: PerGroup) -> Iterator[Conflict]:
    """A conflict where the upper bound of a cycle is below the lower one, in any param group."""
    lows, highs = (value if isinstance(value, tuple) else (value,) for value in (low, high))
    count = max(len(lows), len(highs))
    if 1 < min(len(lows), len(highs)) < count:
        what = f"has {len(highs)} values and {low_key} has {len(lows)}: there is one for each param group"
        yield Conflict((high_key, low_key), what, "write as many in both, or one number")
        return
    for group in range(count):
        a, b = lows[group % len(lows)], highs[group % len(highs)]
        if b < a:
            yield Conflict(
                (high_key, low_key),
                f"{b:g} is below {low_key} {a:g}, and a cycle goes from {low_key} up to {high_key}",
                f"swap the two, or raise {high_key}",
            )
            return
