"""A disk benchmark that finds the best request settings for a directory, for `launch bench io`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from launcher.errors import OffloadError
from launcher.offload import faults
from launcher.offload.aio import DirectFile, IoQueue, IoRequest
from launcher.offload.directory import OwnDirectory
from launcher.offload.tier import ALIGNMENT, buffer

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = (256 * KIB, MIB, 4 * MIB, 8 * MIB)
IN_FLIGHT = (2, 4, 8, 16, 32)
DISK = (16 * MIB, 8)
"""Block size and requests in flight that measure the limit of the disk: the largest requests in use."""
MEMORY = 256 * MIB
NEAR = 0.97
"""Settings this close to the best count as equal; of these, the one with the fewest bytes in flight wins."""


@dataclass
class IoMeasurement:
    """The measured speed of one setting.

    Attributes:
        write, read: bytes/s, one number per round.
    """

    block_size: int
    in_flight: int
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    @property
    def both(self) -> float:
        """Return the bytes/s of writing and then reading the same bytes, as a training step does."""
        return 2 / (1 / median(self.write) + 1 / median(self.read))

    def section(self) -> dict[str, int]:
        """Return the `aio` section of the JSON config with this setting."""
        return {"block_size": self.block_size, "queue_depth": self.in_flight, "intra_op_parallelism": 1}


class Bench:
    """A file of `size` bytes in its own directory, and memory to copy to and from it."""

    def __init__(self, path: Path, size: int) -> None:
        self._directory = OwnDirectory(path, rank=0)
        try:
            self.file = DirectFile(self._directory.data)
            self.size = size - size % DISK[0]
            self.file.grow(self.size)
            self.memory = buffer(min(self.size, MEMORY), torch.uint8, pin=False)
            self.memory.view(torch.int64).random_()  # disks with compression get no advantage
            # warm-up: the first write to newly allocated blocks does extra work
            self.run(*DISK, self.size, write=True)
        except OSError as error:
            self._directory.close()
            raise faults.as_offload_error(error, f"creating a file of {size:,} bytes", path) from error
        except BaseException:
            self._directory.close()
            raise

    def run(self, block_size: int, in_flight: int, size: int, *, write: bool) -> float:
        """Transfer `size` bytes from the start of the file; return the bytes/s."""
        queue = IoQueue(block_size, in_flight)
        requests = [
            IoRequest(self.file, offset, self._part(offset, min(block_size, size - offset)), write, str)
            for offset in range(0, size, block_size)
        ]
        try:
            started = time.perf_counter()
            queue.submit(requests).result()
            return size / (time.perf_counter() - started)
        finally:
            queue.close()

    def close(self) -> None:
        self.file.close()
        self._directory.close()

    def _part(self, offset: int, size: int) -> Tensor:
        start = offset % self.memory.numel()
        return self.memory[start : start + size]


@contextmanager
def bench(path: Path, size: int) -> Iterator[Bench]:
    """Yield a benchmark whose file is removed at the end.

    Raises:
        OffloadError: the directory cannot hold the file.
    """
    if size < 2 * DISK[0]:
        raise OffloadError(
            f"{size:,} bytes are too few for a measurement", fix=f"use at least {2 * DISK[0]:,}"
        )
    made = Bench(path, size)
    try:
        yield made
    finally:
        made.close()


def sweep(
    made: Bench, seconds: float, tell: Callable[[float], None] = lambda share: None
) -> list[IoMeasurement]:
    """Measure the limit of the disk (first row) and the settings, in rounds, for about `seconds`.

    The first two rounds measure all settings. Each later round drops the slower half, down to four settings,
    so that most of the time is spent on those that are close to each other.

    Args:
        tell: called with the fraction of the time that has passed.
    """
    disk = IoMeasurement(*DISK)
    rows = [IoMeasurement(block, number) for block in BLOCKS for number in IN_FLIGHT]
    started = time.perf_counter()
    speed = min(made.run(*DISK, 2 * DISK[0], write=write) for write in (True, False))
    size = _size_of_turn(made.size, speed * seconds / (10 * len(rows)))
    left = rows
    while True:
        for i, row in enumerate([disk, *left]):
            row.write.append(made.run(row.block_size, row.in_flight, size, write=True))
            row.read.append(made.run(row.block_size, row.in_flight, size, write=False))
            passed = (time.perf_counter() - started) / seconds
            tell(min(passed, 1.0))
            if passed > 1 and all(row.read for row in rows[: i + 1]) and left[-1].read:
                return [disk, *rows]
        if len(disk.read) > 1:
            left = sorted(left, key=lambda row: -row.both)[: max(4, len(left) // 2)]


def best(rows: list[IoMeasurement]) -> IoMeasurement:
    """Return the recommended setting: of those measured most often and close to the fastest, the one with the
    fewest bytes in flight."""
    most = max(len(row.read) for row in rows)
    often = [row for row in rows if len(row.read) == most]
    fastest = max(row.both for row in often)
    near = [row for row in often if row.both >= NEAR * fastest]
    return min(near, key=lambda row: row.block_size * row.in_flight)


def _size_of_turn(most: int, wished: float) -> int:
    """Return the bytes per measurement: enough for every setting to fill its queue, at most the file size."""
    size = min(max(int(wished), 2 * DISK[0]), most)
    return size - size % ALIGNMENT
