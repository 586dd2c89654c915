"""The NCCL transport: CUDA ranks, through the collectives of torch.distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.groups import timeout_of
from launcher.comm.pending import Pending
from launcher.comm.transport import Transport, Way

# torch 2.13 renamed these two; older versions know only the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_openings: Counter[str] = Counter()
"""How often ways of a group were opened. Engines that follow each other share the group of all ranks and its
store, and all ranks open their ways in the same order."""


class NcclTransport(Transport):
    """Transport over two process groups of the same ranks.

    Args:
        group: for gathers, broadcasts, and messages between ranks without an open `Way`.
        reductions: for the rest. NCCL needs all ranks to start the collectives of a group in the same order,
            and under ZeRO-3 an on-demand gather may come before a reduction on one rank and after it on
            another.

    [Note: A communicator for each way]
    Everything that a communicator does on a rank runs on one stream, in the order in which it was started. A
    pipeline posts a receive before the send that the receive is an answer to. On a shared communicator the
    send would wait for the receive, and the receive for the other rank, which waits for the send. So each
    `Way` has a communicator of its two ranks. It is connected when it is opened, in the same order on all
    ranks: otherwise NCCL would connect it at its first message, and block the host until the other rank
    reaches its end of that message. Receives are not posted ahead either: a kernel that waits for another
    rank delays everything that waits for the whole device, such as loading a kernel, and the other rank may
    depend on what comes after that.
    """

    posts_ahead = False

    def __init__(self, group: dist.ProcessGroup, reductions: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group, self.reductions = group, reductions
        self._ways: dict[Way, Any] = {}  # torch's stubs lack Backend.send and recv

    def __str__(self) -> str:
        return ""  # a run already reports "nccl"

    def all_gather(self, full: Tensor, within: slice) -> Pending:
        slices = self.slices(full, within)
        if slices[0].numel() * self.degree != full.numel():
            return self.all_gather_slices(slices)
        return Pending([_all_gather(full, slices[self.rank], group=self.group, async_op=True)])

    def all_gather_slices(self, slices: list[Tensor]) -> Pending:
        return Pending([dist.all_gather(slices, slices[self.rank], group=self.group, async_op=True)])

    def reduce_scatter(self, full: Tensor, out: Tensor, within: slice, *, accumulate: bool) -> Pending:
        direct = not accumulate and out.dtype == full.dtype
        result = out if direct else torch.empty(out.numel(), dtype=full.dtype, device=full.device)
        if self.degree * out.numel() == full.numel():
            work = _reduce_scatter(result, full, group=self.reductions, async_op=True)
        else:
            work = dist.reduce_scatter(
                result, self.slices(full, within), group=self.reductions, async_op=True
            )
        if direct:
            return Pending([work])
        return Pending([work], lambda: out.add_(result) if accumulate else out.copy_(result))

    def all_reduce(self, buffer: Tensor) -> Pending:
        return Pending([dist.all_reduce(buffer, group=self.reductions, async_op=True)])

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        return Pending([dist.broadcast(buffer, group=self.group, group_src=source, async_op=True)])

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        mine = outgoing[self.rank].new_empty(0)  # NCCL would copy this rank's own entry
        out = [mine if rank == self.rank else part for rank, part in enumerate(outgoing)]
        into = [mine if rank == self.rank else part for rank, part in enumerate(incoming)]
        return Pending([dist.all_to_all(into, out, group=self.reductions, async_op=True)])

    def open_ways(self, ways: Iterable[Way]) -> None:
        _openings[self.group.group_name] += 1
        opening = dist.PrefixStore(f"ways {_openings[self.group.group_name]}", self.group.get_group_store())
        for way in sorted(set(ways) - self._ways.keys()):
            if self.rank in (way.source, way.to):
                store = dist.PrefixStore(f"{way.source} to {way.to}, {way.back}", opening)
                self._ways[way] = self._between_two(store, 0 if self.rank == way.source else 1)

    def close_ways(self) -> None:
        if self._ways:
            torch.cuda.synchronize()  # no message may be in flight
        for way in self._ways.values():
            way.shutdown()
        self._ways.clear()

    def send(self, tensor: Tensor, to: int, *, back: bool) -> Pending:
        way = self._ways.get(Way(self.rank, to, back))
        return Pending([self.group.send([tensor], to, 0) if way is None else way.send([tensor], 1, 0)])

    def receive(self, tensor: Tensor, source: int, *, back: bool) -> Pending:
        way = self._ways.get(Way(source, self.rank, back))
        return Pending([self.group.recv([tensor], source, 0) if way is None else way.recv([tensor], 0, 0)])

    def _between_two(self, store: dist.Store, rank: int) -> dist.ProcessGroupNCCL:
        """Return a communicator of two ranks, of which rank 0 is the sender. Both must call this."""
        # torch has 32 streams for all others, so that two communicators might share one
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout_of(self.group)
        made = dist.ProcessGroupNCCL(store, rank, 2, options)
        device = torch.device("cuda", torch.cuda.current_device())
        made.eager_connect_single_device(device)
        first = torch.zeros(1, device=device)  # the first message blocks the host: do it now
        way: Any = made
        (way.send([first], 1, 0) if rank == 0 else way.recv([first], 0, 0)).wait()
        return made
