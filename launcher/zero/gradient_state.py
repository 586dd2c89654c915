"""The state of a gradient between microbatches, and what features may do to it."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from torch import Tensor

from launcher.comm import Pending


class GradientState(Enum):
    """The state of the gradient of the present step; it begins with EMPTY at every step.

    A gradient that is sharded knows two of them:

    EMPTY: nothing has come.
    SCATTERED: this rank's slice of the sum over ranks of the microbatches so far.

    One that is kept whole until the last microbatch knows the others:

    LOCAL: what this rank alone has added up.
    REDUCED: on the owned range the sum over ranks; the rest is of no use.
    REOPENED: another backward has come, or will: this rank's share of an earlier sum, and what is added to that.
    SPENT: nothing of what was REDUCED: it was thrown away, or has been stepped. The other ranks will not reduce it
        again, so neither does this one.
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
    """A feature that looks at this rank's gradients before they are reduced."""

    def look(self, full: Tensor) -> None:
        """A collected gradient [numel] is about to be reduced."""

    def clear(self) -> None:
        """The step is over."""


class SecondHop(Protocol):
    """A feature that reduces a gradient further, once a step."""

    def start(self) -> Pending:
        """Start it, after the reduction of the last microbatch."""

    def clear(self) -> None:
        """The step is over."""
