"""A cache of idle buffers: reused by size, and freed where the total would exceed the peak in use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MakeBuffer = Callable[[int, torch.dtype], Tensor]
"""Allocates memory: (elements, dtype) -> uninitialized [elements]."""


class BufferCache:
    """A cache of flat buffers that are taken and given back.

    A buffer is reused only if nothing else refers to its memory: a view that autograd or a user still holds
    keeps its values, and costs memory instead of correctness.

    Args:
        make: allocates new buffers.
        sparing: the total, idle buffers included, never exceeds the peak in use so far: the oldest idle
            buffers are freed to make space for a new one. Otherwise buffers are kept.

    Attributes:
        most: the peak of bytes in use at once.
        nbytes: bytes of idle buffers.
    """

    def __init__(self, make: MakeBuffer, *, sparing: bool = False) -> None:
        self._make, self._sparing = make, sparing
        self._buffers: list[Tensor] = []  # each uint8 [bytes], the newest last
        self._in_use = self.most = self.nbytes = 0
        self._alone = _use_count(torch.empty(1))
        # by address: copies from idle buffers that are still in flight
        self._travelling: dict[int, torch.cuda.Event] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer [numel]."""
        size = numel * dtype.itemsize
        self._in_use += size
        in_use: list[int] = []
        for i in range(len(self._buffers) - 1, -1, -1):
            if self._buffers[i].numel() == size and _use_count(self._buffers[i]) == self._alone:
                return self._remove(i).view(dtype)
            if self._buffers[i].numel() == size:  # still referenced: its last holder frees it
                in_use.append(i)
        for i in in_use:
            self._remove(i)
        self._spare()
        return self._make(numel, dtype)

    def give(self, buffer: Tensor, sent: torch.cuda.Event | None = None) -> None:
        """Give a buffer back.

        Args:
            sent: the event of a copy from the buffer that is still in flight; the device waits for it before
                the buffer is written to again.
        """
        if sent is not None:
            self._travelling[buffer.data_ptr()] = sent
        raw = buffer.view(torch.uint8)
        self._in_use -= raw.numel()
        self.nbytes += raw.numel()
        self._buffers.append(raw)

    def clear(self) -> None:
        """Free every idle buffer."""
        while self._buffers:
            self._remove(-1)

    def _remove(self, index: int) -> Tensor:
        """Remove an idle buffer; make the device wait for a copy from it that is in flight, if any."""
        buffer = self._buffers.pop(index)
        self.nbytes -= buffer.numel()
        if self._travelling and (sent := self._travelling.pop(buffer.data_ptr(), None)) is not None:
            sent.wait()
        return buffer

    @property
    def held(self) -> int:
        """Return the bytes of all buffers, idle and in use."""
        return self._in_use + self.nbytes

    def _spare(self) -> None:
        self.most = max(self.most, self._in_use)
        while self._sparing and self._buffers and self._in_use + self.nbytes > self.most:
            self._remove(0)


def _use_count(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)  # type: ignore[attr-defined]
