"""Flight recorder: the last operation that a rank began and its step times, in memory shared with its agent.

An update of the 512 bytes takes a microsecond, and the agent can read them while the rank hangs. Uses only
the standard library, since both sides import it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import Counter
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

VARIABLE = "LAUNCHER_BEACON"
SIZE = 512
_TEXT_SIZE = 256
_HEAD = struct.Struct("<QdH")  # number, time.monotonic, bytes of the text
_LONGEST = _TEXT_SIZE - _HEAD.size
_BETWEEN = "\n"
_TRIES = 3
COUNTED = ("forward", "backward", "step")
"""The phases of a step with a time and a wait time in `StepCounters`."""


@dataclass(frozen=True)
class StepCounters:
    """The steps of a rank and their total seconds; `*_wait` is the part spent waiting for other ranks."""

    steps: float = 0.0
    """Optimizer steps of the run, including those before a resume."""
    samples: float = 0.0
    """Sequences over all ranks."""
    counted: float = 0.0
    """Optimizer steps included in the times below."""
    total: float = 0.0
    """Seconds since the end of the first step."""
    forward: float = 0.0
    forward_wait: float = 0.0
    backward: float = 0.0
    backward_wait: float = 0.0
    step: float = 0.0
    step_wait: float = 0.0
    checkpoint: float = 0.0
    """Seconds of saves that blocked training."""
    memory: float = 0.0
    """Bytes that the process currently holds on its device."""
    peak: float = 0.0
    saved_step: float = -1.0
    """The step of the last complete checkpoint; -1 if there is none."""
    saved_at: float = 0.0
    """Seconds since the epoch."""


_COUNTERS = struct.Struct(f"<Q{len(fields(StepCounters))}d")
assert _COUNTERS.size <= SIZE - _TEXT_SIZE


@dataclass(frozen=True)
class FlightRecord:
    """The last operation that a rank began, and its age; `number` counts operations of the ranks `among`."""

    number: int
    text: str
    since_s: float
    among: str = ""


class FlightRecorder:
    """The rank's side of the record.

    Args:
        path: a file of SIZE bytes.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._numbers: Counter[str] = Counter()
        self._counters, self._written, self._lock = StepCounters(), 0, threading.Lock()

    def show(self, text: str, among: str = "") -> None:
        """Record the start of an operation of the ranks `among`, which all count their operations alike."""
        self._numbers[among] += 1
        data = f"{among}{_BETWEEN}{text}".encode()[:_LONGEST]
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, 0, self._numbers[among], time.monotonic(), len(data))

    def count(self, counters: StepCounters) -> None:
        """Record the counters so far, except for those that `saved` records."""
        with self._lock:
            saved = {"saved_step": self._counters.saved_step, "saved_at": self._counters.saved_at}
            self._write(replace(counters, **saved))

    def saved(self, step: int) -> None:
        """Record that the checkpoint of a step is complete; thread-safe."""
        with self._lock:
            self._write(replace(self._counters, saved_step=step, saved_at=time.time()))

    def _write(self, counters: StepCounters) -> None:
        # Sequence lock: the number is odd during a write, upon which readers retry.
        self._counters, self._written = counters, self._written + 2
        struct.pack_into("<Q", self._memory, _TEXT_SIZE, self._written - 1)
        _COUNTERS.pack_into(self._memory, _TEXT_SIZE, self._written - 1, *astuple(counters))
        struct.pack_into("<Q", self._memory, _TEXT_SIZE, self._written)


def prepare(path: Path) -> None:
    """Create the file for a rank."""
    path.write_bytes(bytes(SIZE))


def read(path: Path) -> FlightRecord | None:
    """Return the last record of a rank; None if there is none yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    number, when, length = _HEAD.unpack_from(data)
    if number == 0:
        return None
    among, _, text = data[_HEAD.size : _HEAD.size + length].decode(errors="replace").partition(_BETWEEN)
    return FlightRecord(number, text, time.monotonic() - when, among)


def read_counters(path: Path) -> StepCounters | None:
    """Return the step counters of a rank; None before the first step."""
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        number, *values = _COUNTERS.unpack_from(data, _TEXT_SIZE)
        if number == 0:
            return None
        if number % 2 == 0:
            return StepCounters(*values)
    return None


def mine() -> FlightRecorder | None:
    """Return the flight recorder of this process; None if no agent monitors it."""
    path = os.environ.get(VARIABLE)
    return FlightRecorder(path) if path and os.path.exists(path) else None
