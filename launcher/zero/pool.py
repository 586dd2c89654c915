"""Buffers that live long and are used again: gathered parameters and gradients on their way to the reduction."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.offload.tier import memory

if TYPE_CHECKING:
    from launcher.zero.flat import FlatBuffer


class BufferPool:
    """Flat buffers by size and dtype.

    A returned buffer is handed out again only when nothing else refers to its memory: a view that autograd or a
    user still holds keeps its values, and costs memory instead of correctness.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # who is gathered where, by the address of the storage object
        self.occupants: dict[int, FlatBuffer] = {}
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._alone = _use_count(torch.empty(1))

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer [numel] with any content."""
        idle = self._idle[numel, dtype]
        for i in range(len(idle) - 1, -1, -1):
            if _use_count(idle[i]) == self._alone:
                return idle.pop(i)
        idle.clear()  # what is still referred to will be freed by whoever holds it
        return memory(numel, dtype, self.device)

    def give(self, buffer: Tensor) -> None:
        """Hand a buffer back."""
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    def clear(self) -> None:
        """Free every idle buffer."""
        self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for buffers in self._idle.values() for b in buffers)


def _use_count(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)  # type: ignore[attr-defined]
