"""Copies between device and host that run beside the computation."""

from __future__ import annotations

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
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


def send_to_host(into: Tensor, source: Tensor) -> torch.cuda.Event | None:
    """Copy into host memory, and wait for nothing; `into` must not be read before the event has been waited for. What
    the device does next with `source` comes after the copy.

    Returns:
        None where the copy is done.
    """
    into.copy_(source, non_blocking=True)
    return recorded(source.device)


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
