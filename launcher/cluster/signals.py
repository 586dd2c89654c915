"""Signals to the front end: recorded when they arrive, acted on where it is safe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """A signal has arrived; `number` is its number."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


class Signals:
    """The signals that have arrived.

    Attributes:
        numbers: in the order of arrival.
        held: the run is already ending: `look_up` does not raise.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.held = False

    def look_up(self) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self.numbers and not self.held:
            raise Interrupted(self.numbers[0])

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Record signals inside the `with` block; ignore them after it."""

        def note(number: int, frame: FrameType | None) -> None:
            self.numbers.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            # The run is over: a signal must not interrupt its final message.
            for number in before:
                signal.signal(number, signal.SIG_IGN)
