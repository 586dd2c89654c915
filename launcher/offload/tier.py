"""Tiers: storage of tensors by key. Glossary of the package.

A tier stores tensors under keys and returns their values. The first write of a key allocates a range of a
file; later writes must have the same number of bytes. Reads and writes are futures, which complete in any
order; each key has at most one future at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from launcher.errors import OffloadError

ALIGNMENT = 4096
"""Bytes; direct I/O needs addresses, offsets and lengths that are multiples of this, on all current disks."""

HUGE_PAGE = 2 << 20


class Tier(Protocol):
    """Storage for tensors by key. It is used from one thread; futures complete in any order."""

    @property
    def name(self) -> str:
        """Return the name for messages: `nvme`."""

    def reserve(self, size: int) -> None:
        """Ensure space for `size` more bytes. Call this before the run, with the total to be written.

        Raises:
            OffloadError: there is less space; contains the bytes needed and found.
        """

    def write(self, key: str, tensor: Tensor) -> Future[None]:
        """Store the values of a contiguous tensor, which must not change until the future is done."""

    def read(self, key: str, into: Tensor) -> Future[None]:
        """Fill a contiguous tensor of the size written, which must not be used until the future is done."""

    def free(self, key: str) -> None:
        """Free the storage of a key, whose futures must be done."""

    def close(self) -> None:
        """Wait for all transfers and free everything. A second call does nothing."""


def buffer(numel: int, dtype: torch.dtype, *, pin: bool | None = None) -> Tensor:
    """Return uninitialized host memory [numel] suited to tiers: aligned to 4096 bytes, and returned to the
    system when the tensor is freed. Page-locked if `pin` is true or, by default, if CUDA is available."""
    size = numel * dtype.itemsize
    if size == 0:
        return torch.empty(numel, dtype=dtype)
    locks = torch.cuda.is_available() if pin is None else pin
    pages = _mapped(padded(size), forks=not locks)
    if locks:
        _lock_pages(pages)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size].view(dtype)


def memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory [numel] of a device, for long-lived tensors. Large CPU tensors use huge
    pages: an optimizer step over them is up to twice as fast, because the hardware prefetcher is not stopped
    by the end of a 4096-byte page."""
    if device.type == "cpu" and numel * dtype.itemsize >= HUGE_PAGE:
        return buffer(numel, dtype, pin=False)
    return torch.empty(numel, dtype=dtype, device=device)


def _mapped(size: int, *, forks: bool = True) -> np.ndarray:
    """Return new memory, uint8 [size], in huge pages if it is large. Direct I/O on huge pages is twice as
    fast, because a request is a few long segments for the disk instead of one per 4096 bytes.

    Args:
        forks: share the memory with forked processes (a DataLoader's workers). Linux would copy locked pages
            for each of them at once.
    """
    large = size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    room = size + HUGE_PAGE if large else size  # pages that are never touched take no memory
    mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not forks and hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)
    pages = np.frombuffer(mapping, np.uint8)
    if not large:
        return pages
    start = -pages.ctypes.data % HUGE_PAGE
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        # exclude an end that does not fill a huge page: it would take a whole one
        mapping.madvise(mmap.MADV_HUGEPAGE, start, size - size % HUGE_PAGE)
    return pages[start : start + size]


def padded(size: int) -> int:
    """Return `size` bytes rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def size_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor's values."""
    return tensor.numel() * tensor.element_size()


def finished() -> Future[None]:
    """Return a future that is done."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


def as_bytes(tensor: Tensor, key: str) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 [bytes]."""
    if not tensor.is_contiguous():
        raise OffloadError(f"the tensor for {key} is not contiguous", fix="pass tensor.contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8)


def wrong_size(key: str, asked: int, there: int | None) -> OffloadError:
    """Return the error for a key with a different size, or for a missing key (`there` is None)."""
    if there is None:
        return OffloadError(f"{key} was never written, or has been freed", where="offload tier")
    return OffloadError(
        f"{key} has {there:,} bytes, but {asked:,} were requested",
        where="offload tier",
        fix="free the key before writing it with another size",
    )


def _lock_pages(pages: np.ndarray) -> None:
    """Page-lock memory without torch's pinned memory allocator, which rounds sizes up to powers of two."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(pages.ctypes.data, pages.nbytes, 0))
    # the array is freed before its mapping
    weakref.finalize(pages, runtime.cudaHostUnregister, pages.ctypes.data).atexit = False
