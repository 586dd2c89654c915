"""Tiers: where tensors rest under names. Glossary of the package.

A tier takes tensors under keys and gives their values back. A tensor that rests has a place, a range of a file. The
first write of a key allocates the place; later ones must have as many bytes. Reads and writes are futures, which
complete in any order; one key has one future at a time.
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
"""Bytes: addresses, offsets and lengths of direct I/O are multiples of it, on every disk of today."""

HUGE_PAGE = 2 << 20


class Tier(Protocol):
    """A storage for tensors under names. One thread uses it; futures complete in any order."""

    @property
    def name(self) -> str:
        """Return the name for people: `nvme`."""

    def reserve(self, size: int) -> None:
        """Make sure of room for `size` bytes more. To be called before the run, with all that will be written.

        Raises:
            OffloadError: there is less, with the bytes needed and found.
        """

    def write(self, key: str, tensor: Tensor) -> Future[None]:
        """Keep the values of a contiguous tensor, which must not change until the future is done."""

    def read(self, key: str, into: Tensor) -> Future[None]:
        """Fill a contiguous tensor of as many bytes as were written; nobody may touch it until the future is done."""

    def free(self, key: str) -> None:
        """Give the place of a key back. Waits for nothing: its futures must be done."""

    def close(self) -> None:
        """Wait for what is under way and free everything. A second call does nothing."""


def buffer(numel: int, dtype: torch.dtype, *, pin: bool | None = None) -> Tensor:
    """Return host memory [numel] that tiers like, with any content: it begins at a multiple of 4096 bytes and is given
    back to the system when the tensor dies. Page-locked under CUDA, or as `pin` says."""
    size = numel * dtype.itemsize
    if size == 0:
        return torch.empty(numel, dtype=dtype)
    locks = torch.cuda.is_available() if pin is None else pin
    pages = _mapped(padded(size), forks=not locks)
    if locks:
        _lock_pages(pages)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size].view(dtype)


def memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the memory [numel] of a device, with any content, for what lives long. In huge pages where it is large and
    the CPU's: an optimizer's step over it is then up to twice as fast, as the processor fetches ahead across 4096
    bytes."""
    if device.type == "cpu" and numel * dtype.itemsize >= HUGE_PAGE:
        return buffer(numel, dtype, pin=False)
    return torch.empty(numel, dtype=dtype, device=device)


def _mapped(size: int, *, forks: bool = True) -> np.ndarray:
    """Return new memory, uint8 [size], in huge pages where it is large: direct I/O on them is twice as fast, as a
    request is then a few long pieces for the disk and not one of every 4096 bytes.

    Args:
        forks: forked processes (a DataLoader's workers) have it, too. Linux would copy locked pages for each at once.
    """
    large = size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    room = size + HUGE_PAGE if large else size  # what is never touched takes no memory
    mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not forks and hasattr(mmap, "MADV_DONTFORK"):
        mapping.madvise(mmap.MADV_DONTFORK)
    pages = np.frombuffer(mapping, np.uint8)
    if not large:
        return pages
    start = -pages.ctypes.data % HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        # the end, if it fills no huge page, is left to small ones: it would take a whole one
        mapping.madvise(mmap.MADV_HUGEPAGE, start, size - size % HUGE_PAGE)
    return pages[start : start + size]


def padded(size: int) -> int:
    """Return `size` bytes rounded up to what direct I/O can move."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def size_of(tensor: Tensor) -> int:
    """Return the bytes of its values."""
    return tensor.numel() * tensor.element_size()


def finished() -> Future[None]:
    """Return a future that is done."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


def as_bytes(tensor: Tensor, key: str) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 [bytes]."""
    if not tensor.is_contiguous():
        raise OffloadError(f"the tensor for {key} is not contiguous", fix="hand over tensor.contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8)


def wrong_size(key: str, asked: int, there: int | None) -> OffloadError:
    """Return the error for a key that has another size, or is not there at all (`there` is None)."""
    if there is None:
        return OffloadError(f"{key} was never written, or was freed", where="offload tier")
    return OffloadError(
        f"{key} has {there:,} bytes, but {asked:,} are requested",
        where="offload tier",
        fix="free the key before it is written with another size",
    )


def _lock_pages(pages: np.ndarray) -> None:
    """Page-lock memory without torch's allocator of pinned memory, which rounds sizes up to powers of two."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(pages.ctypes.data, pages.nbytes, 0))
    # the array ends before the mapping under it does
    weakref.finalize(pages, runtime.cudaHostUnregister, pages.ctypes.data).atexit = False
