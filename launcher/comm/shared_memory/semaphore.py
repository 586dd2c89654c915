"""Semaphores of the C library (sem_overview(7)), in memory shared by several processes.

Everything that a process wrote before `post` is visible to another one after its `wait`: the library issues
the memory barriers that the processor needs, on x86 and aarch64 alike. A waiting process sleeps in the kernel
(futex) and burns no core.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from functools import cache
from typing import Any

BYTES = 64  # room for a sem_t, a cache line of its own


class Semaphore:
    """A semaphore at an address.

    Args:
        address: of BYTES bytes of shared memory, aligned to them, which must stay mapped.
    """

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)
        held, freed = _libraries()
        self._post, self._try, self._timed = held.sem_post, held.sem_trywait, freed.sem_timedwait

    def start(self, value: int) -> None:
        """Initialize the semaphore with this value; call it once, before any process uses it."""
        _libraries()[0].sem_init(self._at, 1, value)

    def post(self) -> None:
        """Add one, which wakes a waiter."""
        self._post(self._at)

    def taken(self) -> bool:
        """Take one if there is one, and return whether there was."""
        return bool(self._try(self._at) == 0)

    def wait(self, limit_s: float) -> bool:
        """Take one, and wait for it at most `limit_s` seconds. Return False if there was none."""
        until = time.time() + limit_s
        deadline = _Time(int(until), int(until % 1 * 1e9))
        while self._timed(self._at, ctypes.byref(deadline)) != 0:
            number = ctypes.get_errno()
            if number == errno.ETIMEDOUT:
                return False
            if number != errno.EINTR:
                raise OSError(number, f"waiting for a semaphore: {os.strerror(number)}")
        return True


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@cache
def _libraries() -> tuple[Any, Any]:
    """Return the C library twice: for calls with the GIL held, which return at once, and for calls with the
    GIL released, which may block."""
    held, freed = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_void_p
    held.sem_init.argtypes = [pointer, ctypes.c_int, ctypes.c_uint]
    held.sem_post.argtypes = held.sem_trywait.argtypes = [pointer]
    freed.sem_timedwait.argtypes = [pointer, ctypes.POINTER(_Time)]
    return held, freed
