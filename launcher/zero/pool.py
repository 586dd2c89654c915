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
        take, give: those of `BufferCache`.
    """

    def __init__(self, device: torch.device, idle: BufferCache | None = None) -> None:
        self.device = device
        self.occupants: dict[int, FlatBuffer] = {}
        self._idle = idle or BufferCache(partial(_new, device))
        self.take, self.give = self._idle.take, self._idle.give

    def clear(self) -> None:
        """Free every idle buffer."""
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
