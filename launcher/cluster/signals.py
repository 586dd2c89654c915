"""Signals to the front end: noted when they come, acted on where it is safe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """A signal came; `number` is which."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


class Signals:
    """The signals that have come.

    Attributes:
        numbers: in order.
        held: the run is ending anyway: `look_up` says nothing.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.held = False

    def look_up(self) -> None:
        """Raise `Interrupted` where a signal has come."""
        if self.numbers and not self.held:
            raise Interrupted(self.numbers[0])

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Note signals inside of the `with`; after it none disturbs."""

        def note(number: int, frame: FrameType | None) -> None:
            self.numbers.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            # The run is over: what comes now must not spoil its message.
            for number in before:
                signal.signal(number, signal.SIG_IGN)
