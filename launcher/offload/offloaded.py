"""Flat tensors that are in memory only while somebody works with them.

    away --fetch--> coming --load--> here --write_back--> leaving --(written)--> away
                                     here --discard--> away        leaving --load--> here

A tensor that has no tier is always here, and nothing moves it.
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
    """Host buffers for what rests in tiers.

    Args:
        leaving: tensors that may be on their way to a tier while others are worked with; what is more is waited for.
        pin: page-locked; None: under CUDA.
        make: host memory: (elements, dtype) -> [elements] with any content; default: what tiers like.

    Attributes:
        idle: where they come from; takes no more memory than is in use at once, unless that is page-locked, which
            takes time.
    """

    def __init__(self, leaving: int = 0, *, pin: bool | None = None, make: MakeBuffer | None = None) -> None:
        self.leaving = leaving
        pins = torch.cuda.is_available() if pin is None else pin
        self.make = make or partial(buffer, pin=pin)
        self.idle = BufferCache(self.make, sparing=not pins)
        self._queue: deque[OffloadedTensor] = deque()

    def leave(self, resting: OffloadedTensor) -> None:
        """A tensor is being written: the oldest ones are waited for until what is on its way is allowed to be."""
        self._queue.append(resting)
        while len(self._queue) > self.leaving:
            self._queue[0].wait_for_writes()

    def left(self, resting: OffloadedTensor) -> None:
        """It is not on its way any more."""
        self._queue.remove(resting)

    def wait_for_writes(self) -> None:
        """Wait for all that is being written."""
        while self._queue:
            self._queue[0].wait_for_writes()


class OffloadedTensor:
    """A flat tensor [numel] and where it rests.

    Args:
        key: its name in the tier.
        tier: None: it stays in memory.
        tensor: its memory, for one that stays.
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
        self.written = False  # the tier has it

    @property
    def is_offloaded(self) -> bool:
        """Return whether it is not always in memory."""
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
        """Return the bytes of memory that it takes now."""
        return 0 if self._tensor is None else self.nbytes

    def fetch(self) -> None:
        """Start reading it, if it is away."""
        if self._tensor is None:
            assert self.tier is not None and self.written, f"{self.key} has no values yet"
            self._tensor = self._buffers.idle.take(self.numel, self.dtype)
            self._coming = self.tier.read(self.key, self._tensor)

    def load(self) -> Tensor:
        """Return its values, in memory until `write_back` or `discard`."""
        self.fetch()
        if self._coming is not None:
            self._coming.result()
            self._coming = None
        if self._leaving is not None:  # its memory is still that
            self._leaving.result()
            self._leaving = None
            self._buffers.left(self)
        assert self._tensor is not None
        return self._tensor

    def allocate(self) -> Tensor:
        """Return the memory for new values, in place of those that it has."""
        if self._tensor is None:
            self._tensor = self._buffers.idle.take(self.numel, self.dtype)
            return self._tensor
        return self.load()

    def write_back(self) -> None:
        """Start writing its values; its memory is given back when that is done."""
        if self.tier is None or self._tensor is None or self._leaving is not None:
            return
        self._leaving = self.tier.write(self.key, self.load())
        self.written = True
        self._buffers.leave(self)

    def discard(self) -> None:
        """Give its memory back: its values have not changed since they were read, or nobody needs them."""
        if self.tier is None or self._tensor is None or self._leaving is not None:
            return
        self._give_back(self.load())

    def wait_for_writes(self) -> None:
        """Wait until it is away, if it is leaving."""
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
    """A part of a flat tensor, wherever that rests."""

    of: OffloadedTensor
    span: slice

    @property
    def numel(self) -> int:
        return int(self.span.stop - self.span.start)

    def load(self) -> Tensor:
        """Return [numel], in memory until the whole is let go of."""
        return self.of.load()[self.span]

    def part(self, start: int, stop: int) -> OffloadedSlice:
        """Return the elements [start, stop) of it."""
        return OffloadedSlice(self.of, slice(self.span.start + start, self.span.start + stop))


class PrefetchWindow:
    """Flat tensors that are asked for in turn: the last few of them are in memory.

    Args:
        changed: they are written to, and new ones are zeros.
    """

    MOST = 4

    def __init__(self, *, changed: bool) -> None:
        self._changed = changed
        self._open: dict[OffloadedTensor, None] = {}  # by last use

    def load(self, part: OffloadedSlice) -> Tensor:
        """Return [numel]; good until the next call."""
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
        """Let go of all."""
        while self._open:
            self._let_go(next(iter(self._open)))

    def _let_go(self, whole: OffloadedTensor) -> None:
        del self._open[whole]
        whole.write_back() if self._changed else whole.discard()


@contextmanager
def in_turn(*, changed: bool = False) -> Iterator[PrefetchWindow]:
    """Yield a window that is closed at the end."""
    window = PrefetchWindow(changed=changed)
    try:
        yield window
    finally:
        window.close()
