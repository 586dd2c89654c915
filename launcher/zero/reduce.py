"""Gradient reduction: unit by unit, overlapped with the backward of earlier units.

[Note: the order of reductions]

Collectives match by order, so all ranks must start the same ones in the same order. Gradients may arrive in a
different order on another rank, or not at all. The order is therefore fixed in advance: units in reverse
order of registration, the root unit last. A unit that is ready before its turn waits. A unit that misses some
or all of its gradients contributes zeros, either when the backward has passed it
([Note: a gradient may not come] in hooks.py) or at the end of the backward.

[Note: who frees a gradient when]

`collect` moves the leaves' gradients into one buffer and clears them on the leaves, so from then on only the
buffer is held. For sharded gradients the buffer comes from the pool. `FlatGradient.done` returns it after the
wait for all its buckets, because the collectives may read it until then. Reductions overlap with the backward
of the next unit and would pile up on a slow network. So when a unit becomes ready, reductions older than
UNITS_IN_FLIGHT units are waited for. Before a bucket starts, earlier ones are waited for until all buckets in
flight together have at most `reduce_bucket_size` elements. The second hop of a gradient, and an optimizer step
during backward, start once the sum is complete: in the wait for its last bucket.
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
"""Number of units whose sharded gradients may be in reduction while the next unit computes: see
[Note: who frees a gradient when]."""


def order_of_reduction(units: list[Unit]) -> list[Unit]:
    """Return the units with trainable parameters in reverse order of registration, the root unit last."""
    *blocks, root = units
    return [unit for unit in (*reversed(blocks), root) if unit.gradients]


class ReduceListener(Protocol):
    """Consumes gradients as soon as they are reduced, in the last microbatch of a step."""

    def on_reduce_start(self, gradient: FlatGradient) -> None:
        """Called when the reduction of `gradient` starts."""

    def on_reduced(self, gradient: FlatGradient) -> bool:
        """Called when `gradient` is reduced; return True if it is not needed any more.

        Not called for a gradient with a second hop: the optimizer steps it in `step()`.
        """


@dataclass(frozen=True)
class BackwardPlan:
    """How to handle the gradients of the next backward. The engine makes one plan for each microbatch.

    Args:
        reduces: False leaves the gradients on the leaves, as inside `no_sync`.
        last: this is the last microbatch of a step.
        listener: consumes gradients as soon as they are reduced, only in the last microbatch.
        unit_names: the units that the backward passes through, without the root unit; None: possibly all.
            Empty: a deferred pass of weight gradients, which unshards nothing.
    """

    reduces: bool = True
    last: bool = True
    listener: ReduceListener | None = None
    unit_names: Collection[str] | None = None

    def enters(self, unit_name: str) -> bool:
        """Return whether the backward passes through the unit of that name."""
        return self.unit_names is None or unit_name in self.unit_names


class ReduceInFlight(NamedTuple):
    """A bucket of a gradient that is being reduced. It is dropped after its wait: see
    [Note: who frees a gradient when].

    Args:
        turn: the position of its unit in the reduction order.
        elements: the number of elements in the bucket.
        gradient: the gradient that the bucket belongs to.
        pending: the reduction.
        full_if_last: the buffer of all buckets, if this is its last one; None: more buckets follow.
        last: the reduction was started in the last microbatch of a step.
    """

    turn: int
    elements: int
    gradient: FlatGradient
    pending: Pending
    full_if_last: Tensor | None
    last: bool


class Reducer:
    """Collects and reduces the gradients of units.

    Args:
        order: all units with trainable parameters, in the order of reduction.
        policy: bucket size and overlap.

    Attributes:
        in_flight: buckets that are being reduced, oldest first.
    """

    def __init__(self, order: list[Unit], policy: ZeroPolicy) -> None:
        self.order, self.policy = order, policy
        self.gradients = [gradient for unit in order for gradient in unit.gradients]
        self.plan = BackwardPlan()
        self.unsent = False  # the leaves hold gradients of a backward inside no_sync
        self.norm_computed = False  # the norm of this step is computed: no further gradients may arrive in it
        self._turn = 0
        self._ready: set[Unit] = set()
        self.in_flight: deque[ReduceInFlight] = deque()
        self._elements = 0  # in flight
        self._second_hops: list[Pending] = []  # of the gradients that have a second hop

    def ready(self, unit: Unit) -> None:
        """Mark `unit` as having all its gradients, and reduce every unit whose turn has come."""
        self._ready.add(unit)
        while (following := self.awaited) and following in self._ready:  # see [Note: the order of reductions]
            self._launch(following)
            self._turn += 1
        oldest = self._turn - UNITS_IN_FLIGHT if self.policy.shard_grads else 0
        while self.in_flight and self.in_flight[0].turn < oldest:
            self._wait_oldest()

    def finish(self) -> None:
        """Launch the remaining reductions of the backward, in order, and wait for all of them."""
        for unit in self.remaining_units:
            self._launch(unit)
        self.drain()
        self.unsent = not self.plan.reduces

    def flush(self) -> None:
        """Reduce gradients that were accumulated without communication, because the backward did not know
        that a step would follow."""
        for gradient in self.gradients:
            if self.holds_local(gradient):
                self._reduce(gradient, gradient.collect())
        self.drain()
        self.unsent = False

    def holds_local(self, gradient: FlatGradient) -> bool:
        """Return whether the gradients since the last reduction are local to this rank; the same on all
        ranks."""
        return self.unsent if gradient.sharded else not gradient.reduced

    def drain(self) -> None:
        """Wait for the reductions in flight without launching more, and reset for the next backward."""
        while self.in_flight:
            self._wait_oldest()
        while self._second_hops:
            self._second_hops.pop(0).wait()
        self._turn = 0
        self._ready.clear()

    @property
    def awaited(self) -> Unit | None:
        """Return the unit whose turn is next, or None after the last one was launched."""
        return self.order[self._turn] if self._turn < len(self.order) else None

    @property
    def remaining_units(self) -> list[Unit]:
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
            full_if_last = full if bucket is buckets[-1] else None
            self._elements += elements
            self.in_flight.append(
                ReduceInFlight(self._turn, elements, gradient, pending, full_if_last, self.plan.last)
            )
            if not self.policy.overlap_comm:
                self._wait_oldest()

    def _wait_oldest(self) -> None:
        oldest = self.in_flight.popleft()
        oldest.pending.wait()
        if oldest.full_if_last is not None:
            self._complete(oldest.gradient, oldest.full_if_last, oldest.last)
        self._elements -= oldest.elements

    def _complete(self, gradient: FlatGradient, full: Tensor, last: bool) -> None:
        """Finish a gradient after the wait for all its buckets."""
        gradient.done(full)
        if last and gradient.second_hop is not None:
            self._second_hops.append(gradient.second_hop.start())
        elif not (last and self.plan.listener is not None and self.plan.listener.on_reduced(gradient)):
            gradient.rest(final=last)
