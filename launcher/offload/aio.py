"""The I/O queue: requests of `block_size` bytes, many at a time, straight between memory and the disk (O_DIRECT).

Every request in flight has a thread of its own, which waits in the system call without the GIL. This was measured to be
as fast as asynchronous system calls, or faster: the kernel prepares requests on several cores (docs/offload.md).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from launcher.offload import faults
from launcher.offload.tier import ALIGNMENT, buffer, padded

logger = logging.getLogger("launcher")
DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """A file that is read and written past the system's cache, where the file system lets it.

    Attributes:
        direct: whether it does.
        length: bytes that are allocated on the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.length = path, 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.direct = bool(DIRECT) and self._reopen(DIRECT)
        if not self.direct:
            logger.warning(
                "%s: its file system refuses direct I/O: offloading goes through the system's cache, which costs"
                " memory and speed",
                path.parent,
            )

    def grow(self, length: int) -> None:
        """Allocate the disk's blocks up to `length` bytes; all or nothing.

        Raises:
            OSError: ENOSPC and its kind.
        """
        plain = os.open(
            self.path, os.O_RDWR | os.O_CLOEXEC
        )  # where there is no fallocate, libc writes single bytes
        try:
            os.posix_fallocate(plain, self.length, length - self.length)
        except OSError:
            os.ftruncate(plain, self.length)
            raise
        finally:
            os.close(plain)
        self.length = length

    def write(self, data: np.ndarray, offset: int) -> None:
        """Write uint8 [n]. Under direct I/O address, n and offset are multiples of 4096."""
        done = 0
        while done < data.nbytes:
            done += os.pwritev(self._descriptor, [data[done:].data], offset + done)

    def read(self, data: np.ndarray, offset: int) -> int:
        """Fill uint8 [n]; returns the bytes read, fewer than n where the file ends."""
        done = 0
        while done < data.nbytes:
            got = os.preadv(self._descriptor, [data[done:].data], offset + done)
            if got == 0:
                break
            done += got
        return done

    def close(self) -> None:
        os.close(self._descriptor)

    def _reopen(self, flag: int) -> bool:
        """Open once more with a flag; False where that, or reading so, is refused."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flag)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        plain, self._descriptor = self._descriptor, descriptor
        page = buffer(ALIGNMENT, torch.uint8, pin=False).numpy()
        try:
            self.write(page, 0)
            self.read(page, 0)
        except OSError as error:
            self._descriptor = plain
            os.close(descriptor)
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        os.close(plain)
        os.ftruncate(descriptor, 0)
        return True


@dataclass(frozen=True, slots=True)
class IoRequest:
    """Bytes between memory and a file.

    Attributes:
        memory: uint8 [n] on any device. What does not begin, or end, at a multiple of 4096 takes one copy more.
        label: what it does, for errors.
        seen: called with the bytes as they are on the disk, [n padded to 4096], before a write and after a read.
    """

    file: DirectFile
    offset: int
    memory: Tensor
    write: bool
    label: Callable[[], str]
    seen: Callable[[np.ndarray], None] | None = None


class Transfer(Future[None]):
    """The future of some requests: done when all of them are, failed with what the first failed with."""

    def __init__(self, requests: Sequence[IoRequest]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._left, self._lock = len(requests), threading.Lock()
        self.failure: BaseException | None = None
        gpu = next((request.memory.device for request in requests if request.memory.is_cuda), None)
        # what the memory waits for on the GPU: its values before a write, its last use before a read
        self.ready = torch.cuda.current_stream(gpu).record_event() if gpu is not None else None
        if not requests:
            self.set_result(None)

    def finish_one(self, failure: BaseException | None) -> None:
        """A request is done. Memory is in use until the last one is, so a failure waits for it too."""
        with self._lock:
            self._left -= 1
            self.failure = self.failure or failure
            if self._left:
                return
        if self.failure is None:
            self.set_result(None)
        else:
            self.set_exception(self.failure)


class IoQueue:
    """Threads that carry out requests, first come first served.

    Args:
        block_size: bytes of a request; a multiple of 4096.
        in_flight: requests at a time.
    """

    def __init__(self, block_size: int, in_flight: int) -> None:
        self.block_size, self.in_flight = block_size, in_flight
        self._todo: SimpleQueue[tuple[Transfer, IoRequest] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._bounce: Tensor | None = None  # uint8 [in_flight, block_size]
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[IoRequest]) -> Future[None]:
        """Start requests, each of at most `block_size` bytes; returns at once."""
        transfer = Transfer(requests)
        while len(self._threads) < min(self.in_flight, len(requests)):
            index = len(self._threads)
            thread = threading.Thread(
                target=self._work, args=(index,), name=f"offload-io-{index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        for request in requests:
            self._todo.put((transfer, request))
        return transfer

    def close(self) -> None:
        """Carry out what was submitted, and end the threads."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self, index: int) -> None:
        while (item := self._todo.get()) is not None:
            transfer, request = item
            failure: BaseException | None = None
            try:
                if transfer.failure is None:
                    self._carry_out(request, transfer.ready, index)
            except OSError as error:
                failure = faults.as_offload_error(error, request.label(), request.file.path)
            except BaseException as error:  # it belongs to whoever waits, not to this thread
                failure = error
            transfer.finish_one(failure)
            del item, transfer, request  # nothing is held while this thread waits for work

    def _carry_out(self, request: IoRequest, ready: torch.cuda.Event | None, index: int) -> None:
        memory = request.memory
        size = memory.numel()
        straight = memory.device.type == "cpu" and not (memory.data_ptr() % ALIGNMENT or size % ALIGNMENT)
        on_disk = memory if straight else self._bounce_of(index)[: padded(size)]
        data = on_disk.numpy()
        if request.write:
            if not straight:
                _copy(on_disk[:size], memory, ready)
                on_disk[size:].zero_()
            if request.seen is not None:
                request.seen(data)
            request.file.write(data, request.offset)
            return
        got = request.file.read(data, request.offset)
        if got < data.nbytes:
            raise faults.too_short(request.file.path, request.label(), got)
        if request.seen is not None:
            request.seen(data)
        if not straight:
            _copy(memory, on_disk[:size], ready)

    def _bounce_of(self, index: int) -> Tensor:
        """Return this thread's part of the memory for what cannot go straight; [block_size]."""
        with self._lock:
            if self._bounce is None:
                # not page-locked: in a thread that would open a context on the first GPU
                bounce = buffer(self.in_flight * self.block_size, torch.uint8, pin=False)
                self._bounce = bounce.view(self.in_flight, -1)
        return self._bounce[index]


def _copy(target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> None:
    """Copy, and wait until it is done. With a GPU: on this thread's own stream, after `ready`."""
    if ready is None:
        target.copy_(source)
        return
    stream = torch.cuda.Stream(target.device if target.is_cuda else source.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()
