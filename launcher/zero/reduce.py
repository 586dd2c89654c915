"""When to reduce gradients: unit by unit, while earlier units still compute their backward.

All ranks must start the same collectives in the same order, whatever order their gradients come in. The order is
fixed: units in reverse of registration, the root unit last. A unit that is ready before its turn waits for it. Units
without some or all of their gradients contribute zeros: when the backward has passed them (`hooks.py`), or at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from launcher.comm import Pending
from launcher.zero.gradients import FlatGradient
from launcher.zero.policy import ZeroPolicy
from launcher.zero.unit import Unit

# Where gradients are sharded, reductions of this many units run on while the next unit computes its backward; older
# ones are waited for, so that no more full gradients are held.
UNITS_IN_FLIGHT = 1


def order_of_reduction(units: list[Unit]) -> list[Unit]:
    """Every unit with trainable parameters: the reverse of registration, the root unit, which is last, last."""
    *blocks, root = units
    return [unit for unit in (*reversed(blocks), root) if unit.gradients]


class ReduceListener(Protocol):
    """Who uses gradients as soon as they are reduced, in the last microbatch of a step."""

    def on_reduce_start(self, gradient: FlatGradient) -> None:
        """Its reduction has started."""

    def on_reduced(self, gradient: FlatGradient) -> bool:
        """It is reduced; gives whether nobody needs it any more."""


@dataclass(frozen=True)
class BackwardPlan:
    """What becomes of the gradients of the coming backward. The engine makes one for each microbatch.

    Args:
        reduces: False keeps them on the leaves, as inside `no_sync`.
        last: The microbatch is the last one of a step.
        listener: Uses gradients as soon as they are reduced; only in the last microbatch.
    """

    reduces: bool = True
    last: bool = True
    listener: ReduceListener | None = None


class Reducer:
    """Collects and reduces the gradients of units.

    Args:
        order: every unit with trainable parameters, in the order of reduction.
        policy: bucket size and overlap.
    """

    def __init__(self, order: list[Unit], policy: ZeroPolicy) -> None:
        self.order, self.policy = order, policy
        self.gradients = [gradient for unit in order for gradient in unit.gradients]
        self.plan = BackwardPlan()
        self.unsent = False  # the leaves hold gradients of a backward inside no_sync
        self.measured = False  # the norm of this step was taken: nothing more may come before it is over
        self._turn = 0
        self._ready: set[Unit] = set()
        self._in_flight: deque[tuple[int, int, Callable[[], None]]] = deque()  # turn, elements, completion
        self._elements = 0
        self._second_hops: list[Pending] = []  # of gradients that have one

    def ready(self, unit: Unit) -> None:
        """All gradients of `unit` have come in this backward."""
        self._ready.add(unit)
        while (following := self.awaited) and following in self._ready:
            self._launch(following)
            self._turn += 1
        oldest = self._turn - UNITS_IN_FLIGHT if self.policy.shard_grads else 0
        while self._in_flight and self._in_flight[0][0] < oldest:
            self._wait_oldest()

    def finish(self) -> None:
        """The backward is over: launch what is left, in order, and wait for everything."""
        for unit in self.left:
            self._launch(unit)
        self.abandon()
        self.unsent = not self.plan.reduces

    def flush(self) -> None:
        """Reduce what was accumulated without communication: the step comes after backwards that did not know it."""
        for gradient in self.gradients:
            if self.holds_local(gradient):
                self._reduce(gradient, gradient.collect())
        self.abandon()
        self.unsent = False

    def holds_local(self, gradient: FlatGradient) -> bool:
        """Whether what has come since the last reduction is this rank's alone; the same on all ranks."""
        return self.unsent if gradient.sharded else not gradient.reduced

    def abandon(self) -> None:
        """Wait for what is under way, launch no more, and be ready for the next backward."""
        while self._in_flight:
            self._wait_oldest()
        while self._second_hops:
            self._second_hops.pop(0).wait()
        self._turn = 0
        self._ready.clear()

    @property
    def awaited(self) -> Unit | None:
        """Whose gradients come next in the order; none: the last ones are on their way."""
        return self.order[self._turn] if self._turn < len(self.order) else None

    @property
    def left(self) -> list[Unit]:
        """Those whose reduction has not started in this backward, in order."""
        return self.order[self._turn :]

    @property
    def in_flight(self) -> int:
        """Gradient elements being reduced now."""
        return self._elements

    def _launch(self, unit: Unit) -> None:
        if not self.plan.reduces:
            return
        for gradient in unit.gradients:
            full = gradient.collect()
            if gradient.sharded or self.plan.last:
                self._reduce(gradient, full)

    def _reduce(self, gradient: FlatGradient, full: Tensor) -> None:
        listener = self.plan.listener if self.plan.last else None
        if listener is not None:
            listener.on_reduce_start(gradient)
        full = gradient.to_wire(full)
        chunks = gradient.chunks()
        for chunk in chunks:
            elements = (chunk.stop - chunk.start) * (full.numel() // chunks[-1].stop)
            while self._in_flight and self._elements + elements > self.policy.reduce_bucket_size:
                self._wait_oldest()
            pending = gradient.reduce(full, chunk)
            last = chunk is chunks[-1]
            self._elements += elements
            done = partial(self._complete, pending, gradient, full if last else None, self.plan.last)
            self._in_flight.append((self._turn, elements, done))
            if not self.policy.overlap_comm:
                self._wait_oldest()

    def _wait_oldest(self) -> None:
        _, elements, complete = self._in_flight.popleft()
        complete()
        self._elements -= elements

    def _complete(
        self, pending: Pending, gradient: FlatGradient, full: Tensor | None, boundary: bool
    ) -> None:
        """Wait for one chunk; with the last one comes the buffer that it was the end of."""
        pending.wait()
        if full is None:
            return
        gradient.done(full)
        if boundary and gradient.second_hop is not None:
            self._second_hops.append(gradient.second_hop.start())
        elif not (boundary and self.plan.listener is not None and self.plan.listener.on_reduced(gradient)):
            gradient.rest(final=boundary)
