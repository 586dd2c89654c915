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


class OrderMode(Enum):
    """How the unsharder uses the order of use.

    RECORDING: the order is recorded; nothing is prefetched.
    FOLLOWING: units are prefetched in the recorded order.
    """

    RECORDING = "recording"
    FOLLOWING = "following"


class Unsharder:
    """Unshards units before use and reshards them afterwards.

    Args:
        policy: prefetch size, limit of live parameters, reuse distance.
        max_loaded_numel, max_loaded_units: limits of the offloaded parameters that may be in memory ahead of
            use, as shards or unsharded; at least one unit is.
        saves_memory: unsharded buffers use the same host memory that offload is meant to save. A unit stays
            unsharded for reuse only within the limits above, and at most one offloaded unit is prefetched.
    """

    def __init__(
        self,
        policy: ZeroPolicy,
        max_loaded_numel: int = 0,
        max_loaded_units: int = 0,
        *,
        saves_memory: bool = False,
    ) -> None:
        self.policy, self.saves_memory = policy, saves_memory
        self.max_loaded_numel, self.max_loaded_units = max_loaded_numel, max_loaded_units
        self._loaded: set[Unit] = set()  # offloaded units whose shards are in memory, or on their way
        self._orders: dict[bool, list[Unit]] = {}  # with gradients / without
        self._order: list[Unit] = []
        self._next = 0
        self._order_mode = OrderMode.RECORDING
        self._with_grad = False
        self._active = False
        self.unsharded: dict[Unit, None] = {}  # in the order of unsharding
        self.keeps = False  # unshard once and reshard nothing: many forwards and backwards follow

    # ---- one iteration ----------------------------------------------------------------------

    def begin(self, with_grad: bool) -> None:
        """Start an iteration with a forward of the whole model."""
        self._with_grad, self._active, self._next = with_grad, True, 0
        known = self._orders.get(with_grad)
        self._order_mode = OrderMode.FOLLOWING if known else OrderMode.RECORDING
        self._order = known or []

    def end(self) -> None:
        """End the iteration: store a recorded order and reshard all units."""
        if self._active and self._order_mode is OrderMode.RECORDING:
            self._orders[self._with_grad] = self._order
        self._active = False
        for unit in list(self.unsharded):
            self.reshard(unit)
        for unit in self._loaded:
            unit.rest()
        self._loaded.clear()

    def use(self, unit: Unit, phase: str) -> None:
        """Unshard `unit`, and prefetch the next units while waiting for it.

        Args:
            phase: "forward" or "backward", for the names of collectives.
        """
        if not unit.sharded:
            return
        self._advance(unit)
        self._start(unit, phase)
        self._prefetch(phase)
        unit.wait_for_unshard()

    def leave(self, unit: Unit) -> None:
        """Reshard `unit` after its forward, unless it is used again soon in the recorded order."""
        if unit.sharded and not self._reused_soon(unit):
            self.reshard(unit)

    def reshard(self, unit: Unit) -> None:
        """Reshard a unit, unless something holds it: see [Note: who reshards a unit when]."""
        if self.keeps or unit.held:
            return
        unit.reshard()
        self.unsharded.pop(unit, None)

    # ---- inside -----------------------------------------------------------------------------

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep units unsharded until the end of the `with`."""
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
            self._loaded.discard(unit)
            self.unsharded[unit] = None
            unit.unshard(phase)

    def _advance(self, unit: Unit) -> None:
        if not self._active:
            return
        if self._order_mode is OrderMode.FOLLOWING:
            if self._next < len(self._order) and self._order[self._next] is unit:
                self._next += 1
                return
            if self.policy.warn_of_order:
                self._warn_order_changed(unit)
            self._order_mode, self._order = OrderMode.RECORDING, self._order[: self._next]
        self._order.append(unit)

    def _warn_order_changed(self, unit: Unit) -> None:
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
        if self._order_mode is not OrderMode.FOLLOWING or not self._active or not self.policy.overlap_comm:
            return
        prefetched = 0
        for unit in self._order[self._next :]:
            if prefetched >= self.policy.prefetch_bucket_size or (
                prefetched and self.saves_memory and unit.is_offloaded
            ):
                break
            prefetched += unit.numel
            if unit not in self.unsharded:  # see [Note: all ranks gather alike]
                if self.live + unit.numel > self.policy.max_live_parameters:
                    break
                if unit.is_offloaded and unit not in self._loaded:
                    break
                self._start(unit, phase)
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Start loading the shards of later units: the same on every rank, so that their all-gathers match."""
        near: set[Unit] = set()
        for unit in self._order[self._next :]:
            if not unit.is_offloaded or unit in near:
                continue
            if near and not self._fits(near, unit):
                return
            near.add(unit)
            if unit not in self.unsharded and unit not in self._loaded:
                unit.fetch()
                self._loaded.add(unit)

    def _fits(self, near: set[Unit], unit: Unit) -> bool:
        """Return whether a unit may be in memory in addition to the units in `near`."""
        return len(near) < self.max_loaded_units and (
            sum(one.numel for one in near) + unit.numel <= self.max_loaded_numel
        )

    def _reused_soon(self, unit: Unit) -> bool:
        if self._order_mode is not OrderMode.FOLLOWING or self.live > self.policy.max_live_parameters:
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
