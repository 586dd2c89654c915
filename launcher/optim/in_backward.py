"""The step of a flat buffer as soon as its gradient is reduced, while earlier units still compute their backward.

What rests on NVMe is read while the units before it are reduced, and written while those behind it compute: the disk
and the processor work at the same time. It is the step that `ShardedOptimizer.step` would do, done earlier, so it
needs that nothing about the whole gradient has to be known first: no clipping, no overflow that leaves a step out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.zero.gradients import FlatGradient

if TYPE_CHECKING:
    from launcher.optim.sharded import ShardedOptimizer


class OptimizerInBackward:
    """The listener that the reducer calls for the gradients of the last microbatch of a step.

    Args:
        optimizer: steps them.
        scale: gives the factor on all gradients, that of the step to come.
    """

    def __init__(self, optimizer: ShardedOptimizer, scale: Callable[[], float]) -> None:
        self.optimizer, self.scale = optimizer, scale
        self._expected: set[FlatGradient] = set()

    def on_reduce_start(self, gradient: FlatGradient) -> None:
        """Its reduction has started: read what its step needs, if that comes from somewhere.

        Parameters that another rank may have used and this one has not are left to the step. So is what is not
        gathered anew before it is used again: its publication would be a collective inside the backward.
        """
        state, flat = self.optimizer.states[gradient], gradient.flat
        own = flat.sharded or flat.axis.degree == 1
        if state.is_offloaded and own and all(slot.used for slot in flat.slots):
            state.fetch()
            self._expected.add(gradient)

    def on_reduced(self, gradient: FlatGradient) -> bool:
        """Step it, now that it is reduced; return True if it is not needed any more."""
        if gradient not in self._expected:
            return False
        self._expected.remove(gradient)
        self.optimizer.step_in_backward(gradient, self.scale())
        return True
