"""Stepped parameters on their way from host memory, where the optimizer is, to the device."""

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
"""Buffers: one is written while the one before it travels."""


class Upload:
    """Copies updated parameters to the device from page-locked memory, in their own dtype: half of the bytes of fp32
    master weights cross the link, and the host does not wait for them.

    Args:
        memory: page-locked where there is a GPU.
        flats: what is stepped.
    """

    def __init__(self, memory: BufferCache, flats: Iterable[FlatBuffer]) -> None:
        self._memory = memory
        self._bytes = max(uploaded(flats), default=0)  # memory of one size serves all
        self._travelling: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    @contextmanager
    def to(self, params: Tensor) -> Iterator[Tensor]:
        """Yield memory for new values of `params` [numel]; copy some or all of it there before this ends, and do not
        wait."""
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
    """Return the bytes that each buffer sends, of those whose parameters are in other memory than the optimizer."""
    stepped = [flat.params_beside_master for flat in flats if flat.steps_elsewhere]
    return [params.nbytes for params in stepped if params is not None]


def upload_bytes(flats: Iterable[FlatBuffer]) -> int:
    """Return the bytes of memory that a rank needs for it."""
    return AT_ONCE * max(uploaded(flats), default=0)
