"""Memory that is not in use: handed out again by size, and given up where it would be more than is ever needed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MakeBuffer = Callable[[int, torch.dtype], Tensor]
"""New memory: (elements, dtype) -> [elements] with any content."""


class BufferCache:
    """Flat buffers that are taken, given back and taken again.

    A buffer is handed out again only when nothing else refers to its memory: a view that autograd or a
    user still holds keeps its values, and costs memory instead of correctness.

    Args:
        make: where new ones come from.
        sparing: the total, idle buffers included, never exceeds the peak in use so far: for a new buffer the oldest
            idle ones are freed. Else a buffer that was taken once stays.

    Attributes:
        most: bytes that were in use at once.
    """

    def __init__(self, make: MakeBuffer, *, sparing: bool = False) -> None:
        self._make, self._sparing = make, sparing
        self._buffers: list[Tensor] = []  # each uint8 [bytes], the newest last
        self._in_use = self.most = 0
        self._alone = _use_count(torch.empty(1))
        self._travelling: dict[int, torch.cuda.Event] = {}  # by address: what idle buffers hold is on its way

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer [numel] with any content."""
        size = numel * dtype.itemsize
        self._in_use += size
        for i in range(len(self._buffers) - 1, -1, -1):
            if self._buffers[i].numel() == size and _use_count(self._buffers[i]) == self._alone:
                return self._arrived(self._buffers.pop(i)).view(dtype)
        # what is still referred to will be freed by whoever holds it
        for one in self._buffers:
            if one.numel() == size:
                self._arrived(one)
        self._buffers = [one for one in self._buffers if one.numel() != size]
        self._spare()
        return self._make(numel, dtype)

    def give(self, buffer: Tensor, sent: torch.cuda.Event | None = None) -> None:
        """Hand a buffer back.

        Args:
            sent: a copy of its content that is under way: the device does not write to the buffer before.
        """
        if sent is not None:
            self._travelling[buffer.data_ptr()] = sent
        raw = buffer.view(torch.uint8)
        self._in_use -= raw.numel()
        self._buffers.append(raw)

    def clear(self) -> None:
        """Free every idle buffer."""
        while self._buffers:
            self._arrived(self._buffers.pop())

    def _arrived(self, buffer: Tensor) -> Tensor:
        """Return it; the device waits for what is on its way from it."""
        if self._travelling and (sent := self._travelling.pop(buffer.data_ptr(), None)) is not None:
            sent.wait()
        return buffer

    @property
    def nbytes(self) -> int:
        """Return the bytes of idle buffers."""
        return sum(one.numel() for one in self._buffers)

    @property
    def held(self) -> int:
        """Return the bytes of all buffers, idle and in use."""
        return self._in_use + self.nbytes

    def _spare(self) -> None:
        self.most = max(self.most, self._in_use)
        while self._sparing and self._buffers and self._in_use + self.nbytes > self.most:
            self._arrived(self._buffers.pop(0))


def _use_count(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)  # type: ignore[attr-defined]
