"""`Pending`: a collective in flight, as returned by every transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from launcher.comm.observe import Timing


class Waitable(Protocol):
    """An object that can be waited for."""

    def wait(self) -> Any: ...


class WaitClock:
    """The seconds that this process has waited for other ranks. On CUDA the device waits instead."""

    seconds = 0.0


waits = WaitClock()


class Pending:
    """A collective in flight. It holds its buffers: keeping the reference is what keeps them alive.

    Args:
        works: the operations to wait for, in this order.
        finish: called once after them.

    Attributes:
        timing: set while there are observers (`observe.py`).
    """

    def __init__(self, works: Sequence[Waitable] = (), finish: Callable[[], object] | None = None) -> None:
        self._works, self._finish = list(works), finish
        self.timing: Timing | None = None

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: make the current stream wait). Safe to call again."""
        works, self._works = self._works, []
        timing, self.timing = self.timing, None
        if timing is not None:
            timing.begin_wait()
        began = perf_counter()
        for work in works:
            work.wait()
        waits.seconds += perf_counter() - began
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        if timing is not None:
            timing.end_wait()
