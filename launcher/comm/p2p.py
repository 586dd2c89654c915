"""Tensors from one rank of an axis to another: asynchronous, in the order of sending, tagged and recorded.

What goes forward along an axis and what comes back have an order each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from launcher.comm.collectives import profiled
from launcher.comm.mesh import Axis
from launcher.comm.pending import Pending
from launcher.comm.record import CollectiveRecord, keep_record
from launcher.comm.transport import Way


@dataclass
class P2PChannel:
    """The messages that two ranks send each other.

    Args:
        axis: of the ranks.
    """

    axis: Axis

    def open(self, ways: Iterable[Way]) -> None:
        """Make ready for messages on the device that go these ways, many at once. Every rank of the axis must call it,
        with the same."""
        if self.axis.transports is not None:
            self.axis.transports.device.open_ways(ways)

    def close(self) -> None:
        """Give up what was opened."""
        if self.axis.transports is not None:
            self.axis.transports.device.close_ways()

    @property
    def posts_ahead(self) -> bool:
        """Return whether receives may be started before what they wait for can come."""
        return self.axis.transports is None or self.axis.transports.device.posts_ahead

    def send(self, tensor: Tensor, to: int, tag: str, *, back: bool = False) -> Pending:
        """Start sending a contiguous tensor to a coordinate of the axis; it must not change until it was waited for."""
        nbytes = tensor.numel() * tensor.element_size()
        keep_record(CollectiveRecord("send", tag, self.axis.name, tensor.numel(), nbytes, nbytes), self.axis)
        with profiled(self.axis, tag, "send"):
            return self.axis.transport(tensor).send(tensor, to, back=back)

    def receive(self, tensor: Tensor, source: int, tag: str, *, back: bool = False) -> Pending:
        """Start receiving into a contiguous tensor."""
        with profiled(self.axis, tag, "receive"):
            return self.axis.transport(tensor).receive(tensor, source, back=back)
