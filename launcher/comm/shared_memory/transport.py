"""The shared-memory transport: CPU ranks of one machine read directly from each other's memory.

Small tensors are stored in shared memory (`arena.py`): a rank that starts a collective writes its part there,
and a rank that waits for it reads the parts of the others. Only the calling thread works, and it never waits
for readers. Large tensors are read in place (`cross_memory.py`). For gathers, reductions and exchanges,
threads do that while the main thread computes. Messages (`queue.py`) announce where data is, and that it was
read:

    offer   "my part is ready, at this place"       (a reader needs it before it reads)
    read    "I have read what I need of your part"  (its owner needs it before it changes it)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.gloo import GlooTransport, sum_in_rank_order
from launcher.comm.pending import Pending, Waitable
from launcher.comm.shared_memory import cross_memory
from launcher.comm.shared_memory.arena import READ, ShmArena
from launcher.comm.shared_memory.background import BackgroundThread
from launcher.comm.shared_memory.queue import ShmQueue

BLOCK = 1 << 18  # elements summed at a time: few enough to stay in the cache between reading and adding
WHOLE = 1 << 16  # bytes up to which each of more than two ranks sums the whole buffer, instead of a slice
LETTER = 1 << 40  # added to numbers of pairwise messages, which are counted apart from collectives


class SharedMemoryTransport(GlooTransport):
    """Transport between ranks that can read each other's memory.

    Broadcasts and empty tensors are sent over sockets, as in the base class.

    Args:
        mailbox: connected queue for the messages (`connect.py`).
    """

    def __init__(self, group: dist.ProcessGroup, mailbox: ShmQueue) -> None:
        super().__init__(group)
        self.mailbox = mailbox
        self._arena = ShmArena(mailbox)
        self._spin = _local_ranks(self.degree) <= len(os.sched_getaffinity(0))
        self._gathers, self._reductions, self._exchanges = (BackgroundThread() for _ in range(3))

    def __str__(self) -> str:
        return "reading each other's memory"

    # ---- collectives ------------------------------------------------------------------------

    def all_gather_slices(self, slices: list[Tensor]) -> Pending:
        """Read every peer's slice into its place; the peers read slices[rank]."""
        if not slices[self.rank].numel():
            return super().all_gather_slices(slices)
        number = self.numbers.gather()
        shown = self._arena.show([slices[self.rank]], number, self.peers)

        def run() -> None:
            for peer in self.peers:
                place = self.mailbox.receive(peer, number, spin=self._spin and shown is not None)
                self._copy(peer, place, slices[peer])
                self.mailbox.send(peer, number + READ)

        if shown is not None:
            self._tell(shown * len(slices), number)
            return Pending([_Later(run)])
        self._offer([slices[self.rank]] * len(slices), number)
        return Pending([self._gathers.start(run), self._all_have_read(number + READ, slices)])

    def reduce_scatter(self, full: Tensor, out: Tensor, within: slice, *, accumulate: bool) -> Pending:
        """Read slice `rank` of every peer, block by block, and sum the parts of all ranks."""
        slices = self.slices(full, within)
        if not slices[0].numel():
            return super().reduce_scatter(full, out, within, accumulate=accumulate)
        number, mine = self.numbers.reduction(), slices[self.rank]
        shown = self._arena.show(slices, number, self.peers)
        if shown is not None:
            self._tell(shown, number)
            return Pending([_Later(lambda: self._sum_shown(mine, number, out, accumulate))])
        self._offer(slices, number)

        def run() -> None:
            self._sum(mine, number, out, accumulate)
            for peer in self.peers:
                self.mailbox.send(peer, number + READ)

        return Pending([self._reductions.start(run), self._all_have_read(number + READ, slices)])

    def all_reduce(self, buffer: Tensor) -> Pending:
        """Read the peers' whole buffers if they are published; otherwise reduce one slice and read the
        others' sums."""
        if not (buffer.is_contiguous() and buffer.numel()):
            return super().all_reduce(buffer)
        buffer, number, sums = buffer.view(-1), self.numbers.reduction(), self.numbers.reduction()
        shown = None
        if self.degree == 2 or buffer.nbytes <= WHOLE:
            shown = self._arena.show([buffer], number, self.peers)
        if shown is not None:
            self._tell(shown * self.degree, number)
            # with more than two terms, partial sums are written before the last term is read
            mine = buffer if self.degree == 2 else buffer.clone()
            return Pending([_Later(lambda: self._sum_shown(mine, number, buffer))])
        return self._reduce_and_gather(list(buffer.tensor_split(self.degree)), number, sums)

    def _reduce_and_gather(self, slices: list[Tensor], terms: int, sums: int) -> Pending:
        """Reduce-scatter, with the sum in slices[rank]; then every rank reads the others' sums.

        Args:
            terms, sums: numbers of the messages of each.
        """
        mine = slices[self.rank]
        self._offer(slices, terms)

        def run() -> None:
            self._sum(mine, terms, mine)
            self._offer([mine] * len(slices), sums)  # also confirms that this rank has read the terms
            for peer in self.peers:
                self._copy(peer, self.mailbox.receive(peer, sums), slices[peer])
                self.mailbox.send(peer, sums + READ)

        return Pending([self._reductions.start(run), self._all_have_read(sums + READ, slices)])

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        """Read from every peer the part for this rank. Both sides know which parts are empty."""
        number = self.numbers.exchange() + LETTER
        readers = [peer for peer in self.peers if outgoing[peer].numel()]
        writers = [peer for peer in self.peers if incoming[peer].numel()]
        shown = self._arena.show([outgoing[peer] for peer in readers], number, readers)
        for at, peer in enumerate(readers):
            self.mailbox.send(peer, number, outgoing[peer].data_ptr() if shown is None else shown[at])

        def run() -> None:
            for peer in writers:
                place = self.mailbox.receive(peer, number, spin=self._spin and shown is not None)
                self._copy(peer, place, incoming[peer])
                self.mailbox.send(peer, number + READ)

        if shown is not None:
            return Pending([_Later(run)])
        reads = _Reads(self.mailbox, readers, number + READ, outgoing)
        return Pending([self._exchanges.start(run), reads])

    # ---- point-to-point ---------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, *, back: bool) -> Pending:
        """Offer a tensor to one peer."""
        if not tensor.numel():
            return super().send(tensor, to, back=back)
        tensor, number = tensor.view(-1), self.numbers.sent(to, back) + LETTER
        shown = self._arena.show([tensor], number, [to])
        self.mailbox.send(to, number, tensor.data_ptr() if shown is None else shown[0])
        return Pending([_Reads(self.mailbox, [to], number + READ, tensor)] if shown is None else [])

    def receive(self, tensor: Tensor, source: int, *, back: bool) -> Pending:
        """Read what the peer sends, when it is waited for."""
        if not tensor.numel():
            return super().receive(tensor, source, back=back)
        tensor, number = tensor.view(-1), self.numbers.received(source, back) + LETTER

        def run() -> None:
            self._copy(source, self.mailbox.receive(source, number, spin=self._spin), tensor)
            self.mailbox.send(source, number + READ)

        return Pending([_Later(run)])

    # ---- helpers ----------------------------------------------------------------------------

    def _tell(self, places: Sequence[int], number: int) -> None:
        for peer in self.peers:
            self.mailbox.send(peer, number, places[peer])

    def _offer(self, slices: list[Tensor], number: int) -> None:
        self._tell([part.data_ptr() for part in slices], number)

    def _sum_shown(self, mine: Tensor, number: int, out: Tensor, accumulate: bool = False) -> None:
        terms = {self.rank: mine}
        for peer in self.peers:
            place = self.mailbox.receive(peer, number, spin=self._spin)
            if place < 0:
                terms[peer] = self._arena.shown(peer, place, mine.numel(), mine.dtype)
            else:
                terms[peer] = torch.empty_like(mine)
                self._copy(peer, place, terms[peer])
        sum_in_rank_order(terms, out, accumulate=accumulate)
        for peer in self.peers:
            self.mailbox.send(peer, number + READ)

    def _sum(self, mine: Tensor, number: int, out: Tensor, accumulate: bool = False) -> None:
        places = {peer: self.mailbox.receive(peer, number) for peer in self.peers}
        size = min(BLOCK, mine.numel())
        scratch = {peer: torch.empty(size, dtype=mine.dtype) for peer in places}
        for start in range(0, mine.numel(), size):
            where = slice(start, min(start + size, mine.numel()))
            blocks = {self.rank: mine[where]}
            for peer, place in places.items():
                blocks[peer] = scratch[peer][: where.stop - start]
                self._copy(peer, place + start * mine.element_size(), blocks[peer])
            sum_in_rank_order(blocks, out[where], accumulate=accumulate)

    def _copy(self, peer: int, place: int, into: Tensor) -> None:
        if place < 0:
            self._arena.read(peer, place, into)
        else:
            cross_memory.copy(self.mailbox.pid_of(peer), place, into)

    def _all_have_read(self, number: int, offered: object) -> Waitable:
        return _Reads(self.mailbox, self.peers, number, offered)


def _local_ranks(degree: int) -> int:
    """Return the number of ranks on this machine, as far as it is known."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or degree)


class _Later:
    """Work that runs in the thread that waits for it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with torch.no_grad():
                run()


class _Reads:
    """Waits until every peer has read the offered tensors, and keeps them alive until then."""

    def __init__(self, mailbox: ShmQueue, peers: list[int], number: int, offered: object) -> None:
        self._mailbox, self._peers, self._number, self._offered = mailbox, peers, number, offered

    def wait(self) -> None:
        for peer in self._peers:
            self._mailbox.receive(peer, self._number)
