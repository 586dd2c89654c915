"""Tensors from one rank of an axis to another: asynchronous, in the order of sending, tagged and recorded.

What goes forward along an axis and what comes back use a process group each where that matters: NCCL keeps one order in
a group, and a pipeline sends both ways at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from torch.profiler import record_function

from launcher.comm.collectives import CollectiveRecord, Pending, keep_record
from launcher.comm.mesh import Axis

_NUMBERS = 1 << 20


@dataclass
class P2PChannel:
    """What two ranks send each other. Numbers keep messages apart: both sides count them, along the axis.

    Args:
        axis: of the ranks.
    """

    axis: Axis

    def send(self, tensor: Tensor, to: int, tag: str, *, back: bool = False) -> Pending:
        """Start sending a contiguous tensor to a coordinate of the axis; it must not change until it was waited for."""
        number = self._number(self.axis.sent, to, back)
        nbytes = tensor.numel() * tensor.element_size()
        keep_record(CollectiveRecord("send", tag, self.axis.name, tensor.numel(), nbytes, nbytes), self.axis)
        group = self.axis.reductions if back else self.axis.group
        if group is None:
            return Pending([])
        with record_function(f"{tag}/send"):
            if self.axis.memory is not None and tensor.numel():
                return Pending(self.axis.memory.send(tensor.view(-1), to, number))
            return Pending([group.send([tensor], to, number)])

    def receive(self, tensor: Tensor, source: int, tag: str, *, back: bool = False) -> Pending:
        """Start receiving into a contiguous tensor."""
        number = self._number(self.axis.received, source, back)
        group = self.axis.reductions if back else self.axis.group
        if group is None:
            return Pending([])
        with record_function(f"{tag}/receive"):
            if self.axis.memory is not None and tensor.numel():
                return Pending(self.axis.memory.receive(tensor.view(-1), source, number))
            return Pending([group.recv([tensor], source, number)])

    def _number(self, counts: Counter[tuple[int, bool]], peer: int, back: bool) -> int:
        counts[peer, back] += 1
        number = (counts[peer, back] * 2 + back) % _NUMBERS
        return number * 4 + 3  # the other three of four are of collectives
