"""Position in the LR schedule, for checkpoints that record a step count but no scheduler state."""

from __future__ import annotations

from typing import Any

_STEPS = "steps"


def place_in_schedule(steps: int) -> dict[str, int] | None:
    """Return the value that replaces the scheduler state in a checkpoint's meta; None if no step was made."""
    return {_STEPS: steps} if steps else None


def steps_in_schedule(state: Any) -> int | None:
    """Return the step count in a value of `place_in_schedule`; None if `state` is a real scheduler state."""
    return state[_STEPS] if isinstance(state, dict) and state.keys() == {_STEPS} else None
