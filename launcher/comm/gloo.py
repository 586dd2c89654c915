"""The gloo transport: CPU ranks over sockets.

Gloo's own reduce-scatter is an all-reduce of a copy, and its all-gather copies twice. Both are therefore
built from pairwise sends: each rank sends slice j directly to rank j. The traffic is optimal, (N - 1) / N of
the buffer, and the sum is computed in rank order, so that its result is the same on every run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.pending import Pending, Waitable
from launcher.comm.transport import Transport

NUMBERS = 1 << 20  # far more than are ever in flight together


class MessageNumbers:
    """Numbers messages that are in flight together. All ranks count in the same way, each on its own.

    Gathers, reductions, exchanges and point-to-point messages are counted separately, because their order
    relative to each other may differ between ranks. The last two bits of a number identify the kind.
    """

    def __init__(self) -> None:
        self._collectives = [itertools.count(kind, 4) for kind in range(3)]
        self._sent: Counter[tuple[int, bool]] = Counter()  # by (peer, back)
        self._received: Counter[tuple[int, bool]] = Counter()

    def gather(self) -> int:
        return next(self._collectives[0]) % NUMBERS

    def reduction(self) -> int:
        return next(self._collectives[1]) % NUMBERS

    def exchange(self) -> int:
        return next(self._collectives[2]) % NUMBERS

    def sent(self, to: int, back: bool) -> int:
        return self._between_two(self._sent, to, back)

    def received(self, source: int, back: bool) -> int:
        return self._between_two(self._received, source, back)

    def _between_two(self, counts: Counter[tuple[int, bool]], peer: int, back: bool) -> int:
        counts[peer, back] += 1
        return (counts[peer, back] * 2 + back) % NUMBERS * 4 + 3


class GlooTransport(Transport):
    """Transport over a process group with gloo.

    Args:
        why: why no faster transport is used, for display; "" if there is none.
    """

    def __init__(self, group: dist.ProcessGroup, why: str = "") -> None:
        super().__init__(group.rank(), group.size())
        self.group, self.why, self.numbers = group, why, MessageNumbers()

    def __str__(self) -> str:
        return f"sockets: {self.why}" if self.why else "sockets"

    def all_gather_slices(self, slices: list[Tensor]) -> Pending:
        number = self.numbers.gather()
        works: list[Waitable] = [self.group.recv([slices[peer]], peer, number) for peer in self.peers]
        works += [self.group.send([slices[self.rank]], peer, number) for peer in self.peers]
        return Pending(works)

    def reduce_scatter(self, full: Tensor, out: Tensor, within: slice, *, accumulate: bool) -> Pending:
        number, slices = self.numbers.reduction(), self.slices(full, within)
        received = torch.empty(self.degree - 1, out.numel(), dtype=full.dtype, device=full.device)
        parts = {peer: received[peer - (peer > self.rank)] for peer in self.peers}
        works: list[Waitable] = [self.group.recv([parts[peer]], peer, number) for peer in self.peers]
        works += [self.group.send([slices[peer]], peer, number) for peer in self.peers]
        parts[self.rank] = slices[self.rank]
        return Pending(works, lambda: sum_in_rank_order(parts, out, accumulate=accumulate))

    def all_reduce(self, buffer: Tensor) -> Pending:
        return Pending([dist.all_reduce(buffer, group=self.group, async_op=True)])

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        return Pending([dist.broadcast(buffer, group=self.group, group_src=source, async_op=True)])

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        number = self.numbers.exchange()
        works: list[Waitable] = []
        for peer in self.peers:
            if incoming[peer].numel():
                works.append(self.group.recv([incoming[peer]], peer, number))
        for peer in self.peers:
            if outgoing[peer].numel():
                works.append(self.group.send([outgoing[peer]], peer, number))
        return Pending(works)

    def send(self, tensor: Tensor, to: int, *, back: bool) -> Pending:
        return Pending([self.group.send([tensor], to, self.numbers.sent(to, back))])

    def receive(self, tensor: Tensor, source: int, *, back: bool) -> Pending:
        return Pending([self.group.recv([tensor], source, self.numbers.received(source, back))])


def sum_in_rank_order(parts: dict[int, Tensor], out: Tensor, *, accumulate: bool) -> None:
    """Sum the parts of all ranks into `out`, in rank order, so that the order of arrival has no effect.

    Args:
        parts: by rank, at least two; this rank's may be `out` itself. Others may be overwritten.
        accumulate: add to `out` instead of overwriting it.
    """
    first, second, *rest = (parts[rank] for rank in sorted(parts))
    if accumulate:
        out.add_(first).add_(second)
    elif any(part.data_ptr() == out.data_ptr() for part in rest):
        # `out` is a part that is not summed yet. The first part was received and may be overwritten.
        for part in (second, *rest):
            first.add_(part)
        out.copy_(first)
        return
    elif first.dtype == out.dtype:
        torch.add(first, second, out=out)
    else:
        out.copy_(first)
        out.add_(second)
    for part in rest:
        out.add_(part)
