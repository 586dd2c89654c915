"""A pool of reusable buffers for gathered parameters and for gradients that are being reduced."""

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
    """A pool of flat buffers, reused by size.

    Args:
        idle: the cache that buffers are taken from; default: device memory that is never freed.

    Attributes:
        occupants: the unsharded flat buffer in each storage, by the address of the storage object.
        take, give: the methods of `BufferCache`.
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
        """Return the bytes of all buffers, idle and in use."""
        return self._idle.held

    @property
    def idle_bytes(self) -> int:
        return self._idle.nbytes


def _new(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    return memory(numel, dtype, device)
