"""Optimizer-in-backward: steps a flat buffer once its gradient is reduced, before the backward ends.

Tensors on NVMe are read while gradients are being reduced, and written back while the backward of the
remaining units runs, so disk and compute overlap. It is the same step as in `ShardedOptimizer.step`, done
earlier. It therefore requires that the step does not depend on the whole gradient: no clipping, and no
skipping of steps on overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.zero.gradients import FlatGradient

if TYPE_CHECKING:
    from launcher.optim.sharded import ShardedOptimizer


class OptimizerInBackward:
    """Listens to the reducer for the gradients of the last microbatch of a step.

    Args:
        optimizer: steps the gradients.
        scale: returns the factor on all gradients in the coming step.
    """

    def __init__(self, optimizer: ShardedOptimizer, scale: Callable[[], float]) -> None:
        self.optimizer, self.scale = optimizer, scale
        self._expected: set[FlatGradient] = set()

    def on_reduce_start(self, gradient: FlatGradient) -> None:
        """Start loading the tensors of an offloaded step when the reduction starts.

        Parameters that another rank may have used and this one has not are left to the regular step. So are
        buffers that are not gathered again before their next use: publishing them would be a collective
        inside the backward.
        """
        state, flat = self.optimizer.states[gradient], gradient.flat
        own = flat.sharded or flat.axis.degree == 1
        if state.is_offloaded and own and all(slot.used for slot in flat.slots):
            state.fetch()
            self._expected.add(gradient)

    def on_reduced(self, gradient: FlatGradient) -> bool:
        """Step a reduced gradient; return True if it is not needed any more."""
        if gradient not in self._expected:
            return False
        self._expected.remove(gradient)
        self.optimizer.step_in_backward(gradient, self.scale())
        return True
