"""The place in a schedule, where a checkpoint has steps and not the schedule that they were made with."""

from __future__ import annotations

from typing import Any

_STEPS = "steps"


def place_in_schedule(steps: int) -> dict[str, int] | None:
    """Return what stands in a checkpoint's meta for the state of a schedule; None: no step was made."""
    return {_STEPS: steps} if steps else None


def steps_in_schedule(state: Any) -> int | None:
    """Return the steps that were made, of what `place_in_schedule` returned; None of the state of a schedule."""
    return state[_STEPS] if isinstance(state, dict) and state.keys() == {_STEPS} else None
