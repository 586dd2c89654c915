"""Records of all collectives: for code that counts them, and for the flight recorder of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.monitor import flight_recorder

if TYPE_CHECKING:
    from launcher.comm.mesh import Axis


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective as this rank saw it.

    `sent` is in bytes, by the theory of the ring or pairwise algorithm; `nbytes` is the size of the whole
    buffer.
    """

    op: str
    tag: str
    axis: str
    numel: int
    sent: int
    nbytes: int


_recorders: list[list[CollectiveRecord]] = []
recorder = flight_recorder.mine()
"""The flight recorder of this process; None if it is not monitored."""


@contextmanager
def record_collectives() -> Iterator[list[CollectiveRecord]]:
    """Collect a record of every collective started inside the `with`."""
    records: list[CollectiveRecord] = []
    _recorders.append(records)
    try:
        yield records
    finally:
        # by identity: the lists of two callers may be equal
        _recorders[:] = [others for others in _recorders if others is not records]


def keep_record(record: CollectiveRecord, axis: Axis) -> None:
    """Append the record to all active lists and to the flight recorder, unless the axis has degree 1."""
    if axis.degree > 1:
        if recorder is not None:
            among = "" if record.op == "send" else axis.members
            recorder.show(f"{record.op} of {record.tag}", among)
        for records in _recorders:
            records.append(record)


def show_wait(text: str) -> None:
    """Show in the flight recorder what this process waits for, apart from collectives."""
    if recorder is not None:
        recorder.show(text)
