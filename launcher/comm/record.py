"""The record of every collective: one for those who count, and a word for who watches this process."""

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
    """One collective as this rank saw it. `sent` is in bytes, by the theory of the ring or pairwise algorithm;
    `nbytes` are those of the whole buffer."""

    op: str
    tag: str
    axis: str
    numel: int
    sent: int
    nbytes: int


_recorders: list[list[CollectiveRecord]] = []
recorder = flight_recorder.mine()
"""Of this process; None where nobody watches it."""


@contextmanager
def record_collectives() -> Iterator[list[CollectiveRecord]]:
    """Collect a record of every collective started inside the `with`."""
    records: list[CollectiveRecord] = []
    _recorders.append(records)
    try:
        yield records
    finally:
        # equal lists are not the same
        _recorders[:] = [others for others in _recorders if others is not records]


def keep_record(record: CollectiveRecord, axis: Axis) -> None:
    """Give the record to everybody who collects such; nothing is sent along an axis of one rank."""
    if axis.degree > 1:
        if recorder is not None:
            among = "" if record.op == "send" else axis.members
            recorder.show(f"{record.op} of {record.tag}", among)
        for records in _recorders:
            records.append(record)


def show_wait(text: str) -> None:
    """Let who watches this process know what it waits for by itself."""
    if recorder is not None:
        recorder.show(text)
