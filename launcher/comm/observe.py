"""Timing of collectives, while there are observers: their start, and the start and end of the wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from launcher.monitor.clock import Moment, now, seconds_between

if TYPE_CHECKING:
    from launcher.comm.record import CollectiveRecord


class Timing:
    """The times of one collective on this rank.

    Args:
        record: of the collective.
        device: the device whose clock is read.
        started: the time just before the collective was started.
    """

    def __init__(self, record: CollectiveRecord, device: torch.device, started: Moment) -> None:
        self.record, self._device, self._started = record, device, started
        self._waited = self._ended = started

    def begin_wait(self) -> None:
        self._waited = now(self._device)

    def end_wait(self) -> None:
        """Record the end of the wait, and notify all observers."""
        self._ended = now(self._device)
        for observer in observers:
            observer(self)

    @property
    def seconds(self) -> float:
        """Return the time from the start to the end of the wait, overlapped compute included."""
        return seconds_between(self._started, self._ended)

    @property
    def blocked(self) -> float:
        """Return the time spent waiting: what the collective cost this rank."""
        return seconds_between(self._waited, self._ended)


Observer = Callable[[Timing], None]
observers: list[Observer] = []


@contextmanager
def observe_collectives(observer: Observer) -> Iterator[None]:
    """Call `observer` with the timing of every collective that is waited for inside the `with`."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


__all__ = ["Observer", "Timing", "observe_collectives", "observers"]
