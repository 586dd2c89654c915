"""Point-to-point messages between ranks of an axis: asynchronous, in order, tagged and recorded.

Forward and backward messages along an axis are ordered separately.
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
    """Sends and receives messages between ranks of an axis.

    Args:
        axis: of the ranks.
    """

    axis: Axis

    def open(self, ways: Iterable[Way]) -> None:
        """Prepare for many concurrent device messages on these ways. All ranks must pass the same ways."""
        if self.axis.transports is not None:
            self.axis.transports.device.open_ways(ways)

    def close(self) -> None:
        """Close the ways that were opened."""
        if self.axis.transports is not None:
            self.axis.transports.device.close_ways()

    @property
    def posts_ahead(self) -> bool:
        """Return whether receives may be started before the messages that they wait for can arrive."""
        return self.axis.transports is None or self.axis.transports.device.posts_ahead

    def send(self, tensor: Tensor, to: int, tag: str, *, back: bool = False) -> Pending:
        """Start sending a contiguous tensor to a coordinate of the axis. It must not change before `wait()`
        has returned."""
        nbytes = tensor.numel() * tensor.element_size()
        keep_record(CollectiveRecord("send", tag, self.axis.name, tensor.numel(), nbytes, nbytes), self.axis)
        with profiled(self.axis, tag, "send"):
            return self.axis.transport(tensor).send(tensor, to, back=back)

    def receive(self, tensor: Tensor, source: int, tag: str, *, back: bool = False) -> Pending:
        """Start receiving into a contiguous tensor."""
        with profiled(self.axis, tag, "receive"):
            return self.axis.transport(tensor).receive(tensor, source, back=back)
