"""The I/O queue: concurrent requests of `block_size` bytes, directly between memory and the disk (O_DIRECT).

Every request in flight has its own thread, which blocks in the system call without holding the GIL.
Measurements showed this to be as fast as asynchronous system calls, or faster: the kernel prepares requests
on several cores (docs/offload.md).
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
    """A file that is read and written without the page cache, if the file system supports it.

    Attributes:
        direct: whether direct I/O is in use.
        length: bytes allocated on the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.length = path, 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.direct = bool(DIRECT) and self._reopen(DIRECT)
        if not self.direct:
            logger.warning(
                "%s: the file system does not support O_DIRECT; offloading uses the page cache "
                "(slower, more memory)",
                path.parent,
            )

    def grow(self, length: int) -> None:
        """Allocate disk blocks up to `length` bytes; all or nothing.

        Raises:
            OSError: for example ENOSPC.
        """
        # without O_DIRECT: if there is no fallocate, libc writes single bytes
        plain = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(plain, self.length, length - self.length)
        except OSError:
            os.ftruncate(plain, self.length)
            raise
        finally:
            os.close(plain)
        self.length = length

    def write(self, data: np.ndarray, offset: int) -> None:
        """Write uint8 [n]. With direct I/O the address, n and offset must be multiples of 4096."""
        done = 0
        while done < data.nbytes:
            done += os.pwritev(self._descriptor, [data[done:].data], offset + done)

    def read(self, data: np.ndarray, offset: int) -> int:
        """Fill uint8 [n]; return the number of bytes read, which is less than n at the end of the file."""
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
        """Reopen the file with a flag; return False if the open, or a trial write and read, is refused."""
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
    """A transfer of bytes between memory and a file.

    Attributes:
        memory: uint8 [n] on any device. Memory that does not start and end at a multiple of 4096 takes an
            extra copy.
        label: description of the request, for errors.
        seen: called with the bytes as they are on the disk, [n padded to 4096], before a write and after a
            read.
    """

    file: DirectFile
    offset: int
    memory: Tensor
    write: bool
    label: Callable[[], str]
    seen: Callable[[np.ndarray], None] | None = None


class Transfer(Future[None]):
    """The future of several requests: done when all of them are, failed with the first failure."""

    def __init__(self, requests: Sequence[IoRequest]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._left, self._lock = len(requests), threading.Lock()
        self.failure: BaseException | None = None
        gpu = next((request.memory.device for request in requests if request.memory.is_cuda), None)
        # GPU work to wait for: producing the values before a write, their last use before a read
        self.ready = torch.cuda.current_stream(gpu).record_event() if gpu is not None else None
        if not requests:
            self.set_result(None)

    def finish_one(self, failure: BaseException | None) -> None:
        """Record a finished request. The memory is in use until the last request finishes, so failures are
        also reported only then."""
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
    """Threads that process requests in FIFO order.

    Args:
        block_size: bytes per request; a multiple of 4096.
        in_flight: number of concurrent requests.
    """

    def __init__(self, block_size: int, in_flight: int) -> None:
        self.block_size, self.in_flight = block_size, in_flight
        self._todo: SimpleQueue[tuple[Transfer, IoRequest] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._bounce: Tensor | None = None  # uint8 [in_flight, block_size]
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[IoRequest]) -> Future[None]:
        """Start requests, each of at most `block_size` bytes, without waiting for them."""
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
        """Process all submitted requests, and stop the threads."""
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
            except BaseException as error:  # raise it where the future is waited for, not in this thread
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
        """Return this thread's bounce buffer [block_size], for memory that direct I/O cannot use."""
        with self._lock:
            if self._bounce is None:
                # not page-locked: in this thread that would create a CUDA context on the first GPU
                bounce = buffer(self.in_flight * self.block_size, torch.uint8, pin=False)
                self._bounce = bounce.view(self.in_flight, -1)
        return self._bounce[index]


def _copy(target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> None:
    """Copy and wait for completion. With a GPU the copy runs on this thread's own stream, after `ready`."""
    if ready is None:
        target.copy_(source)
        return
    stream = torch.cuda.Stream(target.device if target.is_cuda else source.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()
