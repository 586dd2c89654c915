"""A loss scale over good steps and overflows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EXHAUSTED = "exhausted"


def follow_scale(
    update: Callable[[bool], None], scale: Callable[[], float], overflows: list[bool]
) -> list[Any]:
    """Return the scale after each step; ends with EXHAUSTED if an update raises."""
    path: list[Any] = []
    for overflow in overflows:
        try:
            update(overflow)
        except Exception:
            return [*path, EXHAUSTED]
        path.append(float(scale()))
    return path
