"""Releases memory of files mapped by torch.load, which counts as this process's once it has been read."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect
from collections.abc import Iterable
from functools import cache
from operator import itemgetter
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/maps")


class MappedFiles:
    """Tracks where files are mapped in this process's memory. Linux only: elsewhere no page is released."""

    def __init__(self, files: Iterable[Path]) -> None:
        names = {str(path.resolve()) for path in files}
        lines = MAPS.read_text().splitlines() if MAPS.exists() else []
        found = [line.split(maxsplit=5) for line in lines]
        self._ranges = sorted(_range(parts[0]) for parts in found if len(parts) == 6 and parts[5] in names)

    def let_go(self, tensor: Tensor) -> None:
        """Release the memory of a tensor that has been copied. It is read from disk again if needed."""
        spread = zip(tensor.shape, tensor.stride(), strict=True)
        first, elements = tensor.data_ptr(), 1 + sum((size - 1) * stride for size, stride in spread)
        last = first + elements * tensor.element_size()
        at = bisect(self._ranges, first, key=itemgetter(0)) - 1  # the last range that begins before it
        inside = at >= 0 and last <= self._ranges[at][1]
        # whole pages only, so that the neighbouring tensors' pages are not read twice
        start, stop = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
        if inside and start < stop and tensor.numel():  # anonymous memory would lose its content
            _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low, 16), int(high, 16)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
