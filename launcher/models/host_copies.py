"""Copies between device and host that run beside the computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor


class CopyLane(Protocol):
    """Copies of one direction, one after another. Between `copy` and `wait` both tensors belong to the lane."""

    def copy(self, into: Tensor, source: Tensor) -> Any:
        """Fill `into` [s] from `source` [s] once what is computed so far is done; a ticket for `wait`."""

    def wait(self, ticket: Any) -> None:
        """Make what is computed from now on find the copy done."""


class SynchronousCopies:
    """Copies at once: where there is no stream beside the one that computes."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def wait(self, ticket: None) -> None:
        pass


class SideStreamCopies:
    """Copies on a CUDA stream of its own. The host waits for nothing; streams wait for each other.

    Only `wait` makes it safe to free what was copied: the allocator would give its memory to the stream that computes,
    which then is behind the copy. This bounds memory when a step is queued, not only when it runs.
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
        """Runs what is started inside on this stream, once the work queued so far is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def ticket(self) -> torch.cuda.Event:
        """Return an event that comes when all that this stream was given is done."""
        return self._stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


def send_to_host(into: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Copy into host memory beside what is computed, and wait for nothing. Before the event has been waited for, `into`
    must not be read (`synchronize`), nor `source` written (`wait`).

    Returns:
        None where the copy is done.
    """
    lane = lane_of("to host", source.device)
    if lane is not None:
        return lane.copy(into, source)
    into.copy_(source, non_blocking=True)
    return None


@lru_cache
def lane_of(way: str, device: torch.device) -> SideStreamCopies | None:
    """Return the stream of a device that copies go by, "to host" or "from host"; None where there are no streams."""
    return SideStreamCopies(device) if device.type == "cuda" else None


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that comes when the device has done all that it was given; None where it does so at once."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def lanes(device: torch.device) -> tuple[CopyLane, CopyLane]:
    """Return the lanes to the host, and back from it; a link has both directions at once."""
    if device.type == "cuda":
        return SideStreamCopies(device), SideStreamCopies(device)
    return SynchronousCopies(), SynchronousCopies()


def host_memory(numel: int, like: Tensor) -> Tensor:
    """Return host memory [numel] of the dtype of `like`, page-locked if that is on a CUDA device: else a copy would
    wait."""
    return torch.empty(numel, dtype=like.dtype, pin_memory=like.is_cuda)
