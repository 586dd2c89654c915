"""Shared memory in which a rank shows small tensors to its peers (`queue.py` has the memory).

Who has shown a tensor may change it at once, and waits for nobody who is to read it. What is shown lies in a slot, and
where none is free, in a copy of its own, until all for whom it was meant have said that they have read it.
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

SLOTS = 64  # memory of those that are never used at once is never touched
SLOT = 1 << 20  # bytes
BYTES = SLOTS * SLOT
READ = 2  # a message's number plus this says that what it told of was read


class ShmArena:
    """The memory that this rank shows, and that its peers show.

    A place in a slot is a negative number: a message may name an address of its sender, too, and they are told apart.
    """

    def __init__(self, mailbox: ShmQueue) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._slots: list[_SharedBuffer | None] = [None] * SLOTS
        self._copies: list[_SharedBuffer] = []
        weakref.finalize(self, _unread.append, self._copies)

    def show(self, parts: Sequence[Tensor], number: int, readers: Sequence[int]) -> list[int] | None:
        """Copy flat tensors to where others can read them.

        Args:
            number: of the message that will tell the `readers`.

        Returns:
            the place of each; None: they are too large.
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
        """Return what lies in a slot of a rank: a view, to be read only before it is said to be read."""
        memory, start = self._mailbox.boards[rank]
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start - 1 - place)

    def _room(self, size: int, number: int, readers: Sequence[int]) -> tuple[int, int]:
        """Return (place, address)."""
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
        number: of the message that told them.
        copy: where it lies in no slot.
    """

    number: int
    readers: Sequence[int]
    copy: Tensor | None = None


_unread: list[list[_SharedBuffer]] = []  # of boards that are gone: a peer that is behind may still read them
