"""Copies updated parameters from host memory, where the optimizer runs, to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from launcher.models.host_copies import recorded
from launcher.offload.buffer_cache import BufferCache
from launcher.zero.flat import FlatBuffer

AT_ONCE = 2
"""Number of buffers: one is written while the previous one is copied."""


class Upload:
    """Copies updated parameters to the device from page-locked memory, in their own dtype. Only half the
    bytes of the fp32 master weights cross the link, and the host does not wait for the copies.

    Args:
        memory: page-locked if there is a GPU.
        flats: the flat buffers that are stepped.
    """

    def __init__(self, memory: BufferCache, flats: Iterable[FlatBuffer]) -> None:
        self._memory = memory
        self._bytes = max(uploaded(flats), default=0)  # memory of one size serves all
        self._travelling: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    @contextmanager
    def to(self, params: Tensor) -> Iterator[Tensor]:
        """Yield memory for new values of `params` [numel]. The caller starts asynchronous copies of some or
        all of it to the device inside the `with`."""
        while len(self._travelling) >= AT_ONCE:
            self._wait_for_oldest()
        buffer = self._memory.take(self._bytes, torch.uint8)
        yield buffer[: params.nbytes].view(params.dtype)
        self._travelling.append((buffer, recorded(params.device)))

    def _wait_for_oldest(self) -> None:
        buffer, arrived = self._travelling.popleft()
        if arrived is not None:
            arrived.synchronize()
        self._memory.give(buffer)


def uploaded(flats: Iterable[FlatBuffer]) -> list[int]:
    """Return the bytes uploaded for each buffer whose parameters are on another device than the optimizer."""
    stepped = [flat.params_beside_master for flat in flats if flat.steps_elsewhere]
    return [params.nbytes for params in stepped if params is not None]


def upload_bytes(flats: Iterable[FlatBuffer]) -> int:
    """Return the bytes of host memory that a rank needs for uploads."""
    return AT_ONCE * max(uploaded(flats), default=0)
