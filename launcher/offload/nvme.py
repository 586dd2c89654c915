"""The NVMe tier: tensors in one preallocated file per rank, with direct I/O and checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from launcher.config.offload import AioConfig
from launcher.errors import OffloadError
from launcher.offload import faults
from launcher.offload.aio import DirectFile, IoQueue, IoRequest
from launcher.offload.directory import OwnDirectory
from launcher.offload.free_ranges import FreeRanges
from launcher.offload.tier import ALIGNMENT, as_bytes, finished, padded, size_of, wrong_size

WORDS = ALIGNMENT // 8  # per page
SAMPLES = slice(None, None, WORDS - 1)  # the first and the last word of a page


@dataclass
class Extent:
    """The storage of a key: a range of the file, and a checksum for every request in it."""

    offset: int
    size: int
    sums: list[int]
    last: Future[None] = field(default_factory=finished)


class NvmeTier:
    """Stores tensors in a file under `path`.

    The file is in a directory that belongs to this rank alone. The directory is removed by `close` or, if
    this process crashes, at the next start. It is not a checkpoint.

    Args:
        path: `nvme_path` in the JSON config, an existing directory.
        config: `aio` in the JSON config.
        rank: used in names and messages.
    """

    name = "nvme"

    def __init__(self, path: str | Path, config: AioConfig | None = None, *, rank: int = 0) -> None:
        config = AioConfig() if config is None else config
        self._index: dict[str, Extent] = {}
        self._ranges = FreeRanges()
        self._directory: OwnDirectory | None = OwnDirectory(Path(path), rank)
        try:
            self._file = DirectFile(self._directory.data)
        except OSError as error:
            self._directory.close()
            raise faults.as_offload_error(error, "creating a file for offloaded shards", path) from error
        self._queue = IoQueue(padded(config.block_size), config.queue_depth * config.intra_op_parallelism)
        self._pages = slice(None) if config.checksum == "all" else SAMPLES

    @property
    def file(self) -> Path:
        """Return the path of the data file."""
        return self._file.path

    def reserve(self, size: int) -> None:
        """Allocate `size` more bytes on the disk, so that no other job can take them."""
        there = os.statvfs(self._file.path)
        found = there.f_bavail * there.f_frsize
        if padded(size) > found:
            raise faults.no_room(size, found, self._file.path)
        self._grow(self._file.length + padded(size), f"reserving {size:,} bytes")

    def write(self, key: str, tensor: Tensor) -> Future[None]:
        data = as_bytes(tensor, key)
        size = data.numel()
        if key not in self._index:
            self._index[key] = self._allocated(key, size)
        extent = self._extent(key, size)
        extent.last = self._queue.submit(list(self._requests(key, extent, data, write=True)))
        return extent.last

    def read(self, key: str, into: Tensor) -> Future[None]:
        extent = self._extent(key, size_of(into))
        extent.last = self._queue.submit(list(self._requests(key, extent, as_bytes(into, key), write=False)))
        return extent.last

    def free(self, key: str) -> None:
        extent = self._extent(key, None)
        del self._index[key]
        self._ranges.give(extent.offset, padded(extent.size))

    def close(self) -> None:
        if self._directory is None:
            return
        self._queue.close()
        self._file.close()
        self._directory.close()
        self._directory = None
        self._index.clear()

    def _extent(self, key: str, size: int | None) -> Extent:
        extent = self._index.get(key)
        if extent is None or size not in (None, extent.size):
            raise wrong_size(key, size or 0, None if extent is None else extent.size)
        if not extent.last.done():
            raise OffloadError(
                f"{key} is still being read or written",
                where=str(self.file),
                fix="wait for its previous future first",
            )
        return extent

    def _allocated(self, key: str, size: int) -> Extent:
        offset = self._ranges.take(padded(size))
        if self._ranges.end > self._file.length:
            try:
                self._grow(self._ranges.end, f"allocating {size:,} bytes for {key}")
            except OffloadError:
                self._ranges.give(offset, padded(size))
                raise
        return Extent(offset, size, sums=[])

    def _grow(self, length: int, doing: str) -> None:
        try:
            self._file.grow(length)
        except OSError as error:
            raise faults.as_offload_error(error, doing, self._file.path) from error

    def _requests(self, key: str, extent: Extent, data: Tensor, *, write: bool) -> Iterator[IoRequest]:
        """Yield requests of block_size bytes. The bytes after the last full page are a separate request, so
        that only these need an extra copy."""
        whole = extent.size - extent.size % ALIGNMENT
        block = self._queue.block_size
        edges = sorted({*range(0, whole, block), whole, extent.size})
        if write:
            extent.sums = [0] * (len(edges) - 1)
        for i, (start, end) in enumerate(pairwise(edges)):
            label = _label(key, extent.offset + start, end - start, write=write)
            seen = self._note(extent, i) if write else self._compare(extent, i, label)
            yield IoRequest(self._file, extent.offset + start, data[start:end], write, label, seen)

    def _note(self, extent: Extent, i: int) -> Callable[[np.ndarray], None]:
        sums = extent.sums

        def seen(data: np.ndarray) -> None:
            sums[i] = self._sum(data)

        return seen

    def _compare(self, extent: Extent, i: int, label: Callable[[], str]) -> Callable[[np.ndarray], None]:
        wanted = extent.sums[i]

        def seen(data: np.ndarray) -> None:
            if self._sum(data) != wanted:
                raise faults.damaged(self._file.path, label())

        return seen

    def _sum(self, data: np.ndarray) -> int:
        """Return the sum, modulo 2**64, of the words that are checked. Disks lose or mix up whole pages, so
        by default two words of each page are enough: their cost is negligible, while a sum of all words would
        read the memory once more."""
        return int(data.view(np.uint64).reshape(-1, WORDS)[:, self._pages].sum())


def _label(key: str, offset: int, size: int, *, write: bool) -> Callable[[], str]:
    return lambda: f"{'writing' if write else 'reading'} {size:,} bytes of {key} at offset {offset:,}"
