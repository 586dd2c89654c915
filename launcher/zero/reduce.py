"""Reduction of gradients: unit by unit, while earlier units still compute their backward.

[Note: the order of reductions]

Collectives match by order: all ranks must start the same ones in the same order. Gradients may arrive in another order
on another rank, or not at all. So the order is fixed before anything runs: units in reverse of registration, the root
unit last. A unit that is ready before its turn waits for it. Units without some or all of their gradients contribute
zeros: when the backward has passed them ([Note: a gradient may not come] in hooks.py), or at its end.

[Note: who frees a gradient when]

`collect` moves the leaves' gradients into one buffer and takes them from the leaves at once: from then on only the
buffer is held. Where gradients are sharded it comes from the pool, and goes back in `FlatGradient.done`, after all of
its buckets were waited for: peers may read it until then. Reductions run on while the next unit computes, and would
pile up where the network is slower. So when a unit becomes ready, reductions older than UNITS_IN_FLIGHT units are
waited for; and before a bucket starts, until it and those in flight have at most `reduce_bucket_size` elements. The
second hop of a gradient, and the listener's step, begin where the sum is complete: in the wait for its last bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from launcher.comm import Pending
from launcher.zero.gradients import FlatGradient
from launcher.zero.policy import ZeroPolicy
from launcher.zero.unit import Unit

UNITS_IN_FLIGHT = 1
"""Units whose sharded gradients are reduced while the next unit computes: see [Note: who frees a gradient when]."""


def order_of_reduction(units: list[Unit]) -> list[Unit]:
    """Return the units with trainable parameters in reverse order of registration, but the root unit stays last."""
    *blocks, root = units
    return [unit for unit in (*reversed(blocks), root) if unit.gradients]


class ReduceListener(Protocol):
    """A user of gradients as soon as they are reduced, in the last microbatch of a step."""

    def on_reduce_start(self, gradient: FlatGradient) -> None:
        """Its reduction has started."""

    def on_reduced(self, gradient: FlatGradient) -> bool:
        """It is reduced; return True if nobody needs it any more."""


@dataclass(frozen=True)
class BackwardPlan:
    """The plan for the gradients of the coming backward. The engine makes one for each microbatch.

    Args:
        reduces: False keeps them on the leaves, as inside `no_sync`.
        last: The microbatch is the last one of a step.
        listener: Uses gradients as soon as they are reduced; only in the last microbatch.
        blocks: Names of the units that it goes through, the root unit apart; None: possibly all. An
            empty collection: only gradients of weights come; nothing that needs parameters is computed.
    """

    reduces: bool = True
    last: bool = True
    listener: ReduceListener | None = None
    blocks: Collection[str] | None = None

    def enters(self, unit: str) -> bool:
        """Return whether it goes through the unit of that name."""
        return self.blocks is None or unit in self.blocks


class ReduceInFlight(NamedTuple):
    """A bucket of a gradient on its way. It is dropped after its wait: see [Note: who frees a gradient when].

    Args:
        turn: of its unit in the order.
        elements: of the bucket.
        full: the buffer that this is the last bucket of; None: others follow.
        last: it was started in the last microbatch of a step.
    """

    turn: int
    elements: int
    gradient: FlatGradient
    pending: Pending
    full: Tensor | None
    last: bool


class Reducer:
    """Collects and reduces the gradients of units.

    Args:
        order: every unit with trainable parameters, in the order of reduction.
        policy: bucket size and overlap.

    Attributes:
        in_flight: buckets being reduced, the oldest first.
    """

    def __init__(self, order: list[Unit], policy: ZeroPolicy) -> None:
        self.order, self.policy = order, policy
        self.gradients = [gradient for unit in order for gradient in unit.gradients]
        self.plan = BackwardPlan()
        self.unsent = False  # the leaves hold gradients of a backward inside no_sync
        self.measured = False  # the norm of this step was taken: nothing more may come before it is over
        self._turn = 0
        self._ready: set[Unit] = set()
        self.in_flight: deque[ReduceInFlight] = deque()
        self._elements = 0  # of those
        self._second_hops: list[Pending] = []  # of gradients that have one

    def ready(self, unit: Unit) -> None:
        """Reduce `unit`, all of whose gradients have come in this backward, when it is its turn."""
        self._ready.add(unit)
        while (following := self.awaited) and following in self._ready:  # see [Note: the order of reductions]
            self._launch(following)
            self._turn += 1
        oldest = self._turn - UNITS_IN_FLIGHT if self.policy.shard_grads else 0
        while self.in_flight and self.in_flight[0].turn < oldest:
            self._wait_oldest()

    def finish(self) -> None:
        """Launch what is left of the backward, in order, and wait for everything."""
        for unit in self.left:
            self._launch(unit)
        self.drain()
        self.unsent = not self.plan.reduces

    def flush(self) -> None:
        """Reduce what was accumulated without communication: the step comes after backwards that did not know it."""
        for gradient in self.gradients:
            if self.holds_local(gradient):
                self._reduce(gradient, gradient.collect())
        self.drain()
        self.unsent = False

    def holds_local(self, gradient: FlatGradient) -> bool:
        """Return whether what has come since the last reduction is this rank's alone; the same on all ranks."""
        return self.unsent if gradient.sharded else not gradient.reduced

    def drain(self) -> None:
        """Wait for what is under way, launch no more, and be ready for the next backward."""
        while self.in_flight:
            self._wait_oldest()
        while self._second_hops:
            self._second_hops.pop(0).wait()
        self._turn = 0
        self._ready.clear()

    @property
    def awaited(self) -> Unit | None:
        """Return the unit whose turn is next; None: the last one is on its way."""
        return self.order[self._turn] if self._turn < len(self.order) else None

    @property
    def left(self) -> list[Unit]:
        """Return the units whose reduction has not started in this backward, in order."""
        return self.order[self._turn :]

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
        buckets = gradient.buckets()
        for bucket in buckets:
            elements = (bucket.stop - bucket.start) * (full.numel() // buckets[-1].stop)
            while self.in_flight and self._elements + elements > self.policy.reduce_bucket_size:
                self._wait_oldest()
            pending = gradient.reduce(full, bucket)
            whole = full if bucket is buckets[-1] else None
            self._elements += elements
            self.in_flight.append(
                ReduceInFlight(self._turn, elements, gradient, pending, whole, self.plan.last)
            )
            if not self.policy.overlap_comm:
                self._wait_oldest()

    def _wait_oldest(self) -> None:
        oldest = self.in_flight.popleft()
        oldest.pending.wait()
        if oldest.full is not None:
            self._complete(oldest.gradient, oldest.full, oldest.last)
        self._elements -= oldest.elements

    def _complete(self, gradient: FlatGradient, full: Tensor, last: bool) -> None:
        """Take over a collected gradient, all of whose buckets have been waited for."""
        gradient.done(full)
        if last and gradient.second_hop is not None:
            self._second_hops.append(gradient.second_hop.start())
        elif not (last and self.plan.listener is not None and self.plan.listener.on_reduced(gradient)):
            gradient.rest(final=last)
