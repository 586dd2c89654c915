"""Copies between device and host that overlap with the computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor


class CopyLane(Protocol):
    """Copies in one direction, in order. Between `copy` and `wait`, both tensors belong to the lane."""

    def copy(self, into: Tensor, source: Tensor) -> Any:
        """Copy `source` [s] to `into` [s] after the work queued so far; return a ticket for `wait`."""

    def wait(self, ticket: Any) -> None:
        """Order all work that is queued from now on after the copy."""


class SynchronousCopies:
    """Copies synchronously, on devices without streams."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def wait(self, ticket: None) -> None:
        pass


class SideStreamCopies:
    """Copies on a separate CUDA stream. The host never blocks; streams wait for each other.

    A copied tensor may be freed only after `wait`: the allocator reuses its memory on the compute stream,
    which must be ordered after the copy. This bounds memory when a step is queued, not only when it runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, into: Tensor, source: Tensor) -> torch.cuda.Event:
        with self.beside():
            into.copy_(source, non_blocking=True)
        return self.ticket()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the enclosed work on this stream, after the work queued so far on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def ticket(self) -> torch.cuda.Event:
        """Return an event that completes with all work queued on this stream so far."""
        return self._stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


def send_to_host(into: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Copy into host memory, overlapping with the computation and without blocking. Until the event
    completes, `into` must not be read (`synchronize`) and `source` must not be written (`wait`).

    Returns:
        The event of the copy; None if the copy is already done.
    """
    lane = lane_of("to host", source.device)
    if lane is not None:
        return lane.copy(into, source)
    into.copy_(source, non_blocking=True)
    return None


@lru_cache
def lane_of(way: str, device: torch.device) -> SideStreamCopies | None:
    """Return a device's stream for copies "to host" or "from host"; None if the device has no streams."""
    return SideStreamCopies(device) if device.type == "cuda" else None


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes with the work queued on the current stream; None without streams."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def lanes(device: torch.device) -> tuple[CopyLane, CopyLane]:
    """Return one lane to the host and one from it, as the link is full duplex."""
    if device.type == "cuda":
        return SideStreamCopies(device), SideStreamCopies(device)
    return SynchronousCopies(), SynchronousCopies()


def host_memory(numel: int, like: Tensor) -> Tensor:
    """Return host memory [numel] with the dtype of `like`, pinned if `like` is on a CUDA device, because
    copies to pageable memory would block."""
    return torch.empty(numel, dtype=like.dtype, pin_memory=like.is_cuda)
