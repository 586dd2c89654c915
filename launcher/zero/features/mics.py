"""MiCS: what a group of ranks has reduced for itself is summed over the groups, once a step."""

from __future__ import annotations

from launcher.comm import Pending, all_reduce
from launcher.errors import LauncherError
from launcher.zero.gradients import FlatGradient


class GroupSum:
    """The second hop of a gradient, along the `replicate` axis."""

    def __init__(self, gradient: FlatGradient) -> None:
        self._gradient, self._summed = gradient, False

    def start(self) -> Pending:
        """Start the sum over the shard groups.

        Raises:
            LauncherError: it was summed in this step, and would be counted again.
        """
        if self._summed:
            raise LauncherError(
                "there were two backwards in the last microbatch of a step, and after the first one the gradients "
                "were summed over the shard groups",
                where="zero_optimization.mics_shard_size",
                fix="add the losses and call backward once, or use set_gradient_accumulation_boundary()",
            )
        self._summed = True
        flat = self._gradient.flat
        return all_reduce(self._gradient.owned, flat.axes.replicate, f"{flat.name}/replicate")

    def clear(self) -> None:
        """The step is over."""
        self._summed = False
