"""`Transport`: the interface for moving tensors between the ranks of one axis.

Transports do not tag, count or time anything: `collectives.py` and `p2p.py` do, for all of them alike.
`choose.py` selects the transport, once, when an axis gets its process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from launcher.comm.pending import Pending


class Way(NamedTuple):
    """A sequence of messages from one rank of an axis to another, in one direction and in order.

    Attributes:
        source, to: coordinates of the two ranks.
        back: against the direction of the forward pass.
    """

    source: int
    to: int
    back: bool


class Transport(ABC):
    """Moves tensors between the ranks of one axis. `str` describes how, for display.

    Buffers are flat. A buffer of all ranks, `full` [N * s], is N slices of s; `within` selects elements of
    every slice. Inputs must not be changed, and outputs must not be read, before the `Pending` was waited
    for. All ranks start the same gathers in the same order, and likewise the same reductions; but a gather
    may come before a reduction on one rank and after it on another.

    Args:
        rank: coordinate of this rank on the axis.
        degree: number of ranks.

    Attributes:
        posts_ahead: a receive may be started before the message that it waits for can arrive.
    """

    posts_ahead = True

    def __init__(self, rank: int, degree: int) -> None:
        self.rank, self.degree = rank, degree

    def all_gather(self, full: Tensor, within: slice) -> Pending:
        """Fill every slice of `full` from its rank; slice `rank` is already filled."""
        return self.all_gather_slices(self.slices(full, within))

    @abstractmethod
    def all_gather_slices(self, slices: list[Tensor]) -> Pending:
        """Do the same for slices at arbitrary addresses."""

    @abstractmethod
    def reduce_scatter(self, full: Tensor, out: Tensor, within: slice, *, accumulate: bool) -> Pending:
        """Sum slice `rank` of every rank's `full` into `out`, which may be that slice and may have a wider
        dtype."""

    @abstractmethod
    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum a buffer of any shape over the ranks, in place."""

    @abstractmethod
    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Copy the buffer of the rank `source` to all ranks, in place."""

    @abstractmethod
    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        """Send outgoing[r] to rank r and receive incoming[r] from it, except for this rank's own; sizes may
        differ."""

    def open_ways(self, ways: Iterable[Way]) -> None:
        """Let messages of these ways be in flight together, independently. All ranks must pass the same
        ways."""
        return

    def close_ways(self) -> None:
        """Close the ways that were opened."""
        return

    @abstractmethod
    def send(self, tensor: Tensor, to: int, *, back: bool) -> Pending:
        """Send a contiguous tensor to a rank. Forward and backward messages are each received in order."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int, *, back: bool) -> Pending:
        """Receive the next message of the rank `source` in this direction into a contiguous tensor."""

    def slices(self, full: Tensor, within: slice) -> list[Tensor]:
        """Return the elements `within` of every slice."""
        return [part[within] for part in full.chunk(self.degree)]

    @cached_property
    def peers(self) -> list[int]:
        """Return the other ranks, nearest successor first."""
        return peers_of(self.rank, self.degree)


@dataclass(frozen=True)
class Transports:
    """The transports of an axis.

    Args:
        device: for tensors on the device of the run.
        host: for tensors in host memory; the same transport if the run uses CPUs.
    """

    device: Transport
    host: Transport

    @classmethod
    def alike(cls, transport: Transport) -> Transports:
        """Return one transport for both kinds of tensors."""
        return cls(transport, transport)

    def of(self, tensor: Tensor) -> Transport:
        """Return the transport for a tensor."""
        return self.host if tensor.device.type == "cpu" else self.device

    def __str__(self) -> str:
        return str(self.device)


class Alone(Transport):
    """No other rank: an axis of one rank, or a rehearsal, in which receive buffers have arbitrary content."""

    def all_gather(self, full: Tensor, within: slice) -> Pending:
        return Pending()  # without slicing: a rehearsal may have a thousand ranks

    def all_gather_slices(self, slices: list[Tensor]) -> Pending:
        return Pending()

    def reduce_scatter(self, full: Tensor, out: Tensor, within: slice, *, accumulate: bool) -> Pending:
        size = full.numel() // self.degree
        mine = full[self.rank * size : (self.rank + 1) * size][within]
        if accumulate:
            out.add_(mine)
        elif out.data_ptr() != mine.data_ptr():
            out.copy_(mine)
        return Pending()

    def all_reduce(self, buffer: Tensor) -> Pending:
        return Pending()

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        return Pending()

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        return Pending()

    def send(self, tensor: Tensor, to: int, *, back: bool) -> Pending:
        return Pending()

    def receive(self, tensor: Tensor, source: int, *, back: bool) -> Pending:
        return Pending()


def peers_of(rank: int, degree: int) -> list[int]:
    """Return the other ranks of an axis, nearest successor first: no two ranks start with the same peer."""
    return [(rank + step) % degree for step in range(1, degree)]
