"""Flat tensors that are in memory only while they are in use.

    on tier --fetch--> reading --load--> in memory --write_back--> writing --(written)--> on tier
                                         in memory --discard--> on tier    writing --load--> in memory

A tensor without a tier is always in memory and is never moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from launcher.offload.buffer_cache import BufferCache, MakeBuffer
from launcher.offload.tier import Tier, buffer


class HostBuffers:
    """Host buffers for offloaded tensors.

    Args:
        leaving: maximum number of tensors that are being written to a tier at once; further writes wait for
            the oldest.
        pin: use page-locked memory; None: if CUDA is available.
        make: allocates host memory: (elements, dtype) -> uninitialized [elements]; default: memory suited to
            tiers.

    Attributes:
        idle: the cache of the buffers. It frees idle buffers beyond the peak in use, unless they are
            page-locked, because locking takes time.
    """

    def __init__(self, leaving: int = 0, *, pin: bool | None = None, make: MakeBuffer | None = None) -> None:
        self.leaving = leaving
        pins = torch.cuda.is_available() if pin is None else pin
        self.make = make or partial(buffer, pin=pin)
        self.idle = BufferCache(self.make, sparing=not pins)
        self._queue: deque[OffloadedTensor] = deque()

    def leave(self, resting: OffloadedTensor) -> None:
        """Record a tensor that is being written; wait for the oldest writes if more than `leaving` are in
        flight."""
        self._queue.append(resting)
        while len(self._queue) > self.leaving:
            self._queue[0].wait_for_writes()

    def left(self, resting: OffloadedTensor) -> None:
        """Record that a tensor is not being written any more."""
        self._queue.remove(resting)

    def wait_for_writes(self) -> None:
        """Wait for all writes in flight."""
        while self._queue:
            self._queue[0].wait_for_writes()


class OffloadedTensor:
    """A flat tensor [numel] that may be stored on a tier.

    Args:
        key: its name in the tier.
        tier: None: it stays in memory.
        tensor: its memory, if it stays in memory.
    """

    def __init__(
        self,
        key: str,
        numel: int,
        dtype: torch.dtype,
        buffers: HostBuffers,
        tier: Tier | None = None,
        tensor: Tensor | None = None,
    ) -> None:
        self.key, self.numel, self.dtype, self.tier, self._buffers = key, numel, dtype, tier, buffers
        self._tensor = tensor
        self._coming: Future[None] | None = None
        self._leaving: Future[None] | None = None
        self.written = False  # the tier has its values

    @property
    def is_offloaded(self) -> bool:
        """Return whether the tensor is stored on a tier."""
        return self.tier is not None

    @property
    def has_values(self) -> bool:
        return self.written or self._tensor is not None

    @property
    def device(self) -> torch.device:
        """Return the device of its memory."""
        return torch.device("cpu") if self._tensor is None else self._tensor.device

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that it currently uses."""
        return 0 if self._tensor is None else self.nbytes

    def fetch(self) -> None:
        """Start reading it, if it is not in memory."""
        if self._tensor is None:
            assert self.tier is not None and self.written, f"{self.key} has no values yet"
            self._tensor = self._buffers.idle.take(self.numel, self.dtype)
            self._coming = self.tier.read(self.key, self._tensor)

    def load(self) -> Tensor:
        """Return its values, which stay in memory until `write_back` or `discard`."""
        self.fetch()
        if self._coming is not None:
            self._coming.result()
            self._coming = None
        if self._leaving is not None:  # its memory still holds the values
            self._leaving.result()
            self._leaving = None
            self._buffers.left(self)
        assert self._tensor is not None
        return self._tensor

    def allocate(self) -> Tensor:
        """Return its memory for new values, which replace the current ones."""
        if self._tensor is None:
            self._tensor = self._buffers.idle.take(self.numel, self.dtype)
            return self._tensor
        return self.load()

    def write_back(self) -> None:
        """Start writing its values; its memory is freed when the write is done."""
        if self.tier is None or self._tensor is None or self._leaving is not None:
            return
        self._leaving = self.tier.write(self.key, self.load())
        self.written = True
        self._buffers.leave(self)

    def discard(self) -> None:
        """Free its memory without writing: the values are unchanged since they were read, or not needed."""
        if self.tier is None or self._tensor is None or self._leaving is not None:
            return
        self._give_back(self.load())

    def wait_for_writes(self) -> None:
        """Wait for its write in flight, if any, and free its memory."""
        if self._leaving is None:
            return
        self._leaving.result()
        self._leaving = None
        self._buffers.left(self)
        assert self._tensor is not None
        self._give_back(self._tensor)

    def _give_back(self, tensor: Tensor) -> None:
        self._tensor = None
        self._buffers.idle.give(tensor)


@dataclass(frozen=True)
class OffloadedSlice:
    """A slice of a flat tensor that may be offloaded."""

    of: OffloadedTensor
    span: slice

    @property
    def numel(self) -> int:
        return int(self.span.stop - self.span.start)

    def load(self) -> Tensor:
        """Return [numel], in memory until the whole tensor is released."""
        return self.of.load()[self.span]

    def part(self, start: int, stop: int) -> OffloadedSlice:
        """Return a slice of the elements [start, stop)."""
        return OffloadedSlice(self.of, slice(self.span.start + start, self.span.start + stop))


class PrefetchWindow:
    """Keeps the last few offloaded tensors that were loaded in memory.

    Args:
        changed: the tensors are modified, so they are written back; new ones start as zeros.
    """

    MOST = 4

    def __init__(self, *, changed: bool) -> None:
        self._changed = changed
        self._open: dict[OffloadedTensor, None] = {}  # by last use

    def load(self, part: OffloadedSlice) -> Tensor:
        """Return [numel], valid until the next call."""
        whole = part.of
        if not whole.is_offloaded:
            return part.load()
        self._open.pop(whole, None)
        while len(self._open) >= self.MOST:
            self._let_go(next(iter(self._open)))
        self._open[whole] = None
        if self._changed and not whole.has_values:
            whole.allocate().zero_()
        return part.load()

    def close(self) -> None:
        """Release all tensors."""
        while self._open:
            self._let_go(next(iter(self._open)))

    def _let_go(self, whole: OffloadedTensor) -> None:
        del self._open[whole]
        whole.write_back() if self._changed else whole.discard()


@contextmanager
def in_turn(*, changed: bool = False) -> Iterator[PrefetchWindow]:
    """Yield a window that is closed at the end of the `with`."""
    window = PrefetchWindow(changed=changed)
    try:
        yield window
    finally:
        window.close()
