"""MiCS: the gradients reduced inside each shard group are summed over the groups, once per step."""

from __future__ import annotations

from launcher.comm import Pending, all_reduce
from launcher.errors import LauncherError
from launcher.zero.gradients import FlatGradient


class GroupSum:
    """The second reduction of a gradient, along the `replicate` axis."""

    def __init__(self, gradient: FlatGradient) -> None:
        self._gradient, self._summed = gradient, False

    def start(self) -> Pending:
        """Start the sum over the shard groups.

        Raises:
            LauncherError: it was already summed in this step and would be counted twice.
        """
        if self._summed:
            raise LauncherError(
                "the last microbatch of a step had two backward passes, and the gradients were already "
                "summed over the shard groups after the first one",
                where="zero_optimization.mics_shard_size",
                fix="add the losses and call backward once, or use set_gradient_accumulation_boundary()",
            )
        self._summed = True
        flat = self._gradient.flat
        return all_reduce(self._gradient.owned, flat.axes.replicate, f"{flat.name}/replicate")

    def clear(self) -> None:
        """Reset at the end of a step."""
        self._summed = False
