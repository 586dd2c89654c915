"""Shared memory in which a rank publishes small tensors for its peers (the memory belongs to `queue.py`).

A rank may change a tensor as soon as it is published, and never waits for readers. Published data is stored
in a slot or, if none is free, in a copy of its own, until all of its readers have confirmed that they have
read it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.comm.shared_memory.queue import ShmQueue

SLOTS = 64  # slots that are never needed do not touch their memory
SLOT = 1 << 20  # bytes
BYTES = SLOTS * SLOT
READ = 2  # the number of a message plus this confirms that its data was read


class ShmArena:
    """The memory that this rank and its peers publish.

    A place in a slot is a negative number, to distinguish it from an address of the sender, which a message
    may contain instead.
    """

    def __init__(self, mailbox: ShmQueue) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._slots: list[_SharedBuffer | None] = [None] * SLOTS
        self._copies: list[_SharedBuffer] = []
        weakref.finalize(self, _unread.append, self._copies)

    def show(self, parts: Sequence[Tensor], number: int, readers: Sequence[int]) -> list[int] | None:
        """Copy flat tensors to where peers can read them.

        Args:
            number: of the message that will notify the `readers`.

        Returns:
            the place of each tensor; None if they are too large.
        """
        size = sum(part.nbytes for part in parts)
        if size > SLOT:
            return None
        with self._lock:
            place, address = self._room(size, number, readers)
        places, step = [], 1 if place > 0 else -1
        for part in parts:
            ctypes.memmove(address, part.data_ptr(), part.nbytes)
            places.append(place)
            place, address = place + step * part.nbytes, address + part.nbytes
        return places

    def read(self, rank: int, place: int, into: Tensor) -> None:
        """Fill `into` from a slot of a rank."""
        ctypes.memmove(into.data_ptr(), self._address(rank, place), into.nbytes)

    def shown(self, rank: int, place: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a view of the data in a slot of a rank, valid until this rank confirms that it has read
        it."""
        memory, start = self._mailbox.boards[rank]
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start - 1 - place)

    def _room(self, size: int, number: int, readers: Sequence[int]) -> tuple[int, int]:
        """Return (place, address) of memory for `size` bytes."""
        self._copies[:] = [copy for copy in self._copies if not self._was_read(copy)]
        for slot, shown in enumerate(self._slots):
            if shown is None or self._was_read(shown):
                self._slots[slot] = _SharedBuffer(number, readers)
                place = -1 - slot * SLOT
                return place, self._address(self._mailbox.rank, place)
        copy = torch.empty(size, dtype=torch.uint8)
        self._copies.append(_SharedBuffer(number, readers, copy))
        return copy.data_ptr(), copy.data_ptr()

    def _address(self, rank: int, place: int) -> int:
        memory, start = self._mailbox.boards[rank]
        return ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start - 1 - place

    def _was_read(self, shown: _SharedBuffer) -> bool:
        if not all(self._mailbox.has(reader, shown.number + READ) for reader in shown.readers):
            return False
        for reader in shown.readers:
            self._mailbox.receive(reader, shown.number + READ)
        return True


@dataclass(frozen=True)
class _SharedBuffer:
    """A buffer that waits for its readers.

    Args:
        number: of the message that notified them.
        copy: the data, if it is not stored in a slot.
    """

    number: int
    readers: Sequence[int]
    copy: Tensor | None = None


_unread: list[list[_SharedBuffer]] = []  # of arenas that are gone: a slow peer may still read them
