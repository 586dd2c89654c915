"""`Transport`: how tensors go between the ranks of one axis. The interface that every way of sending has.

Nothing here is tagged, counted or timed: `collectives.py` and `p2p.py` do that, for all transports alike, and decide
nothing. `choose.py` decides, once, when an axis gets its process group.
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
    """The messages of one rank of an axis to another, in one direction and in order.

    Attributes:
        source, to: coordinates of the two.
        back: against the direction of the forward pass.
    """

    source: int
    to: int
    back: bool


class Transport(ABC):
    """The ranks of one axis, as they reach each other. `str` says how, for people.

    Buffers are flat. A buffer of all ranks, `full` [N * s], is N slices of s; `within` names elements of every slice.
    What a call is given must not change, and what it fills must not be read, until the `Pending` was waited for. All
    ranks start the same gathers in the same order, and the same reductions; but a gather here may come before a
    reduction, and there after it.

    Args:
        rank: coordinate of this rank on the axis.
        degree: how many ranks there are.

    Attributes:
        posts_ahead: a receive may be started before what it waits for can come.
    """

    posts_ahead = True

    def __init__(self, rank: int, degree: int) -> None:
        self.rank, self.degree = rank, degree

    def all_gather(self, full: Tensor, within: slice) -> Pending:
        """Fill every slice of `full` from its rank; slice `rank` is there already."""
        return self.all_gather_slices(self.slices(full, within))

    @abstractmethod
    def all_gather_slices(self, slices: list[Tensor]) -> Pending:
        """Return the same for slices that lie anywhere."""

    @abstractmethod
    def reduce_scatter(self, full: Tensor, out: Tensor, within: slice, *, accumulate: bool) -> Pending:
        """Sum slice `rank` of every rank's `full` into `out`, which may be that slice, and may have a wider dtype."""

    @abstractmethod
    def all_reduce(self, buffer: Tensor) -> Pending:
        """Sum a buffer of any shape over the ranks, in place."""

    @abstractmethod
    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Copy the buffer of the rank `source` to all ranks, in place."""

    @abstractmethod
    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        """Send outgoing[r] to rank r, and receive incoming[r] from it; sizes may differ. This rank's own are left."""

    def open_ways(self, ways: Iterable[Way]) -> None:
        """Let messages of these ways be in flight together, each way for itself. Every rank calls it with the same."""
        return

    def close_ways(self) -> None:
        """Give up what was opened for them."""
        return

    @abstractmethod
    def send(self, tensor: Tensor, to: int, *, back: bool) -> Pending:
        """Send a contiguous tensor to a rank. What goes forward and what goes back arrives in its order each."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int, *, back: bool) -> Pending:
        """Receive what the rank `source` sends next in this direction into a contiguous tensor."""

    def slices(self, full: Tensor, within: slice) -> list[Tensor]:
        """Return these elements of every slice."""
        return [part[within] for part in full.chunk(self.degree)]

    @cached_property
    def peers(self) -> list[int]:
        """Return the other ranks, nearest successor first."""
        return peers_of(self.rank, self.degree)


@dataclass(frozen=True)
class Transports:
    """The transports of an axis.

    Args:
        device: of tensors on the device of the run.
        host: of tensors in host memory; on CPUs the same.
    """

    device: Transport
    host: Transport

    @classmethod
    def alike(cls, transport: Transport) -> Transports:
        """Return the same for both."""
        return cls(transport, transport)

    def of(self, tensor: Tensor) -> Transport:
        """Return the one that a tensor goes by."""
        return self.host if tensor.device.type == "cpu" else self.device

    def __str__(self) -> str:
        return str(self.device)


class Alone(Transport):
    """Nobody to talk to: an axis of one rank, or a rehearsal, in which what would be received has any content."""

    def all_gather(self, full: Tensor, within: slice) -> Pending:
        return Pending()  # of a thousand ranks that are not there, none needs its slice

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
