"""Buffers that live long and are used again: gathered parameters and gradients on their way to the reduction."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.offload.buffer_cache import BufferCache
from launcher.offload.tier import memory

if TYPE_CHECKING:
    from launcher.zero.flat import FlatBuffer


class BufferPool:
    """Flat buffers by size.

    Args:
        idle: where they come from; default: memory of the device, kept for good.

    Attributes:
        occupants: who is unsharded where, by the address of the storage object.
    """

    def __init__(self, device: torch.device, idle: BufferCache | None = None) -> None:
        self.device = device
        self.occupants: dict[int, FlatBuffer] = {}
        self._idle = idle or BufferCache(partial(_new, device))
        self._travelling: dict[int, torch.cuda.Event] = {}  # by address: what idle buffers hold is on its way

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer [numel] with any content."""
        buffer = self._idle.take(numel, dtype)
        if self._travelling and (sent := self._travelling.pop(buffer.data_ptr(), None)) is not None:
            sent.wait()
        return buffer

    def give(self, buffer: Tensor, sent: torch.cuda.Event | None = None) -> None:
        """Hand a buffer back.

        Args:
            sent: a copy of its content that is under way: the device does not write to the buffer before.
        """
        if sent is not None:
            self._travelling[buffer.data_ptr()] = sent
        self._idle.give(buffer)

    def clear(self) -> None:
        """Free every idle buffer."""
        for sent in self._travelling.values():
            sent.wait()
        self._travelling.clear()
        self._idle.clear()

    @property
    def held_bytes(self) -> int:
        """Return the bytes of idle buffers and of those in use."""
        return self._idle.held

    @property
    def idle_bytes(self) -> int:
        return self._idle.nbytes


def _new(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    return memory(numel, dtype, device)
