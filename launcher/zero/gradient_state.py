"""The state of a gradient between microbatches, and the protocols of features that process it."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from torch import Tensor

from launcher.comm import Pending


class GradientState(Enum):
    """The state of a step's gradient. Every step begins with EMPTY.

    A sharded gradient has two states:

    EMPTY: no gradient has arrived.
    SCATTERED: this rank's slice of the sum over ranks, accumulated over the microbatches so far.

    A gradient that is kept unsharded until the last microbatch is EMPTY or has one of these:

    LOCAL: the local sum of this rank.
    REDUCED: the sum over ranks in the owned range; the other elements are stale.
    REOPENED: another backward runs after the reduction: this rank's share of the earlier sum, plus the
        gradients added since.
    SPENT: nothing is left of a REDUCED gradient, which was discarded or stepped. The other ranks will not
        reduce it again, so neither does this one.
    """

    EMPTY = "empty"
    SCATTERED = "scattered"
    LOCAL = "local"
    REDUCED = "reduced"
    REOPENED = "reopened"
    SPENT = "spent"


HOLDS_VALUES = frozenset(
    {GradientState.SCATTERED, GradientState.LOCAL, GradientState.REDUCED, GradientState.REOPENED}
)
SUM_OVER_RANKS = frozenset({GradientState.REDUCED, GradientState.SPENT})


class GradientInspector(Protocol):
    """A feature that inspects this rank's gradients before they are reduced."""

    def look(self, full: Tensor) -> None:
        """Called before a collected gradient [numel] is reduced."""

    def clear(self) -> None:
        """Called at the end of a step."""


class SecondHop(Protocol):
    """A feature that reduces a gradient further, once per step."""

    def start(self) -> Pending:
        """Start the second reduction, after the reduction of the last microbatch."""

    def clear(self) -> None:
        """Called at the end of a step."""
