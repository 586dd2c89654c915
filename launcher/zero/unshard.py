"""Unsharding and resharding of units, with prefetch in the order of use recorded in an earlier iteration.

The order of use is recorded once, from the start of a forward to the end of its backward (or of the forward
alone, without gradients), and followed from then on: the next units are unsharded ahead of use. A unit that
is used out of order is unsharded on use, and the order is recorded again. The recording affects only speed.

[Note: who reshards a unit when]

    after its forward           `leave`, unless it is used again soon (`Unsharder._reused_soon`)
    after its backward          the hooks, when its last gradient has arrived (`Hooks._finish`)
    a unit without gradients    the hooks, when the backward enters the next unit (`Hooks._free_passed_units`)
    root unit, remaining units  `end`, at the end of the backward or of a forward without gradients
    held by GatheredParameters  the end of its `with` (`Unit.held`), nothing else
    inside `keeping`            nothing before its end: many forwards follow, as in generation

[Note: all ranks gather alike]

Gathers match by order, too, and that order is the same only because all ranks run the same forward and
backward: each rank gathers the units that these reach, and prefetches by the recorded order. Prefetching must
therefore depend on nothing that may differ between ranks: only on the sizes in the policy and on the order,
never on time, on free memory, or on whether a shard has been read from its tier. A shard that has not been
requested yet ends the prefetch (`_prefetch`): waiting for it here would stall this rank while the others
continue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from launcher.zero.policy import ZeroPolicy
from launcher.zero.unit import Unit

logger = logging.getLogger(__name__)


class Following(Enum):
    """How the unsharder uses the order of use.

    RECORDING: the order is recorded; nothing is unsharded ahead.
    FOLLOWING: units are unsharded ahead in the recorded order.
    """

    RECORDING = "recording"
    FOLLOWING = "following"


class Unsharder:
    """Gathers units before use and frees them afterwards.

    Args:
        policy: prefetch size, limit of live parameters, reuse distance.
        ahead, units_ahead: limits of the elements and units of offloaded parameters that may be in memory
            ahead of use, as shards or gathered; at least one unit is.
        saves_memory: gathered buffers use the same host memory that offload is meant to save: each is freed
            at once, and only one unit is gathered ahead.
    """

    def __init__(
        self, policy: ZeroPolicy, ahead: int = 0, units_ahead: int = 0, *, saves_memory: bool = False
    ) -> None:
        self.policy, self.ahead, self.units_ahead, self.saves_memory = (
            policy,
            ahead,
            units_ahead,
            saves_memory,
        )
        self._fetched: set[Unit] = set()
        self._orders: dict[bool, list[Unit]] = {}  # with gradients / without
        self._order: list[Unit] = []
        self._next = 0
        self._mode = Following.RECORDING
        self._with_grad = False
        self._active = False
        self.unsharded: dict[Unit, None] = {}  # in order of gathering
        self.keeps = False  # gather once and free nothing: many forwards and backwards follow

    # ---- one iteration ----------------------------------------------------------------------

    def begin(self, with_grad: bool) -> None:
        """Start an iteration with a forward of the whole model."""
        self._with_grad, self._active, self._next = with_grad, True, 0
        known = self._orders.get(with_grad)
        self._mode = Following.FOLLOWING if known else Following.RECORDING
        self._order = known or []

    def end(self) -> None:
        """End the iteration: store a recorded order and free all gathered units."""
        if self._active and self._mode is Following.RECORDING:
            self._orders[self._with_grad] = self._order
        self._active = False
        for unit in list(self.unsharded):
            self.reshard(unit)
        for unit in self._fetched:
            unit.rest()
        self._fetched.clear()

    def use(self, unit: Unit, phase: str) -> None:
        """Unshard `unit` before this returns, and start the gathers of the next units."""
        if not unit.sharded:
            return
        self._advance(unit)
        self._start(unit, phase)
        self._prefetch(phase)
        unit.wait_for_unshard()

    def leave(self, unit: Unit) -> None:
        """Free `unit` after its forward, unless it is used again soon in the recorded order."""
        if unit.sharded and not self._reused_soon(unit):
            self.reshard(unit)

    def reshard(self, unit: Unit) -> None:
        """Free a unit, unless something holds it: see [Note: who reshards a unit when]."""
        if self.keeps or unit.held:
            return
        unit.reshard()
        self.unsharded.pop(unit, None)

    # ---- inside -----------------------------------------------------------------------------

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep gathered units until the end of the `with`."""
        self.keeps = True
        try:
            yield
        finally:
            self.keeps = False
            self.end()

    @property
    def live(self) -> int:
        """Return the number of elements that are unsharded now."""
        return sum(unit.numel for unit in self.unsharded)

    def _start(self, unit: Unit, phase: str) -> None:
        if unit not in self.unsharded:
            self._fetched.discard(unit)
            self.unsharded[unit] = None
            unit.unshard(phase)

    def _advance(self, unit: Unit) -> None:
        if not self._active:
            return
        if self._mode is Following.FOLLOWING:
            if self._next < len(self._order) and self._order[self._next] is unit:
                self._next += 1
                return
            if self.policy.warn_of_order:
                self._say_departure(unit)
            self._mode, self._order = Following.RECORDING, self._order[: self._next]
        self._order.append(unit)

    def _say_departure(self, unit: Unit) -> None:
        expected = self._order[self._next].name if self._next < len(self._order) else "the end"
        logger.warning(
            "the module order changed: unit %s was used where %s was used before, at position %d of "
            "the iteration; nothing is prefetched until the next iteration "
            "(zero_optimization.log_trace_cache_warnings)",
            unit.name,
            expected,
            self._next + 1,
        )

    def _prefetch(self, phase: str) -> None:
        if self._mode is not Following.FOLLOWING or not self._active or not self.policy.overlap_comm:
            return
        ahead = 0
        for unit in self._order[self._next :]:
            if ahead >= self.policy.prefetch_bucket_size or (
                ahead and self.saves_memory and unit.is_offloaded
            ):
                break
            ahead += unit.numel
            if unit not in self.unsharded:  # see [Note: all ranks gather alike]
                if self.live + unit.numel > self.policy.max_live_parameters:
                    break
                if unit.is_offloaded and unit not in self._fetched:
                    break
                self._start(unit, phase)
        self._fetch()

    def _fetch(self) -> None:
        """Start loading the shards of later units. All ranks load the same ones, so they gather the same."""
        near: set[Unit] = set()
        for unit in self._order[self._next :]:
            if not unit.is_offloaded or unit in near:
                continue
            if near and not self._fits(near, unit):
                return
            near.add(unit)
            if unit not in self.unsharded and unit not in self._fetched:
                unit.fetch()
                self._fetched.add(unit)

    def _fits(self, near: set[Unit], unit: Unit) -> bool:
        """Return whether a unit may be in memory in addition to the units in `near`."""
        return len(near) < self.units_ahead and sum(one.numel for one in near) + unit.numel <= self.ahead

    def _reused_soon(self, unit: Unit) -> bool:
        if self._mode is not Following.FOLLOWING or self.live > self.policy.max_live_parameters:
            return False
        distance, near = 0, {unit}
        for later in self._order[self._next :]:
            if later is unit:
                return True
            distance += later.numel
            if distance > self.policy.max_reuse_distance:
                return False
            if unit.is_offloaded and self.saves_memory and later not in near:
                if not self._fits(near, later):
                    return False
                near.add(later)
        return False
