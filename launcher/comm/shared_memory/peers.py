"""Collectives and messages between CPU ranks of one machine: each rank reads what it needs from its peers' memory.

Small tensors lie in shared memory (`arena.py`): a rank that starts a collective has written its part there, and a
rank that waits for it reads the parts of the others. Only the caller works; nobody waits for readers.
Large ones are read where they lie (`cross_memory.py`), by a thread for gathers and one for reductions, while the main
thread computes. Messages (`queue.py`) say where data lies and that it was read:

    offer   "my part is ready, at this place"       (a reader needs it before it reads)
    read    "I have read what I need of your part"  (its owner needs it before it changes it)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.plain import gather_plain
from launcher.comm.shared_memory import arena, cross_memory
from launcher.comm.shared_memory.arena import READ, ShmArena
from launcher.comm.shared_memory.background import BackgroundThread
from launcher.comm.shared_memory.queue import ShmQueue, ShmQueueAddress

BLOCK = 1 << 18  # elements summed at a time: what was read is still in the cache when it is added
WHOLE = 1 << 16  # bytes up to which more than two ranks sum all of a buffer each, instead of a slice
LETTER = 1 << 40  # letters and collectives count for themselves
Add = Callable[[dict[int, Tensor], slice], None]


class Waitable(Protocol):
    """What can be waited for."""

    def wait(self) -> Any: ...


class PeerMemoryUnavailable(Exception):
    """The peers' memory cannot be read; the text says why."""


def peers_of(rank: int, degree: int) -> list[int]:
    """The other ranks of an axis, nearest successor first, so that no two ranks start with the same peer."""
    return [(rank + step) % degree for step in range(1, degree)]


class PeerMemory:
    """The memory of the other ranks of an axis.

    Args:
        rank: coordinate of this rank on the axis.
        pids: process of each coordinate.
        mailbox: for the messages.
    """

    def __init__(self, rank: int, pids: list[int], mailbox: ShmQueue) -> None:
        self.rank, self.pids, self.mailbox = rank, pids, mailbox
        self.peers = peers_of(rank, len(pids))
        self._board = ShmArena(mailbox)
        self._spin = _local_ranks(len(pids)) <= len(os.sched_getaffinity(0))
        self._gathers, self._reductions = BackgroundThread(), BackgroundThread()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> PeerMemory:
        """Try whether all ranks of `group` can read each other. Collective.

        Raises:
            Unreadable: some rank cannot, on every rank alike.
        """
        if sys.platform != "linux":
            raise PeerMemoryUnavailable("only Linux lets a process read another's memory")
        cross_memory.allow_siblings()
        probe, mailbox = torch.tensor([os.getpid()]), _mailbox(group)
        address = mailbox and (mailbox.address.pid, mailbox.address.descriptor)
        told = gather_plain((cross_memory.machine(), probe.data_ptr(), address), group)
        every = [(machine, place, box and ShmQueueAddress(*box)) for machine, place, box in told]
        # the probe and the mailbox must live until all have read them
        problems = gather_plain(_connected(mailbox, every), group)
        found = [text for text in problems if text]
        if found or mailbox is None:
            raise PeerMemoryUnavailable(found[0])
        mailbox.all_are_connected()
        return cls(group.rank(), [box.pid for _, _, box in every], mailbox)

    # ---- collectives ------------------------------------------------------------------------

    def gather(self, slices: list[Tensor], number: int) -> list[Waitable]:
        """Read every peer's slice into its place; slices[rank] is what the peers read."""
        shown = self._board.show([slices[self.rank]], number, self.peers)

        def run() -> None:
            for peer in self.peers:
                place = self.mailbox.receive(peer, number, spin=self._spin and shown is not None)
                self._copy(peer, place, slices[peer])
                self.mailbox.send(peer, number + READ)

        if shown is not None:
            self._tell(shown * len(slices), number)
            return [_Later(run)]
        self._offer([slices[self.rank]] * len(slices), number)
        return [self._gathers.start(run), self._all_have_read(number + READ, slices)]

    def reduce_scatter(self, slices: list[Tensor], number: int, add: Add) -> list[Waitable]:
        """Read slice `rank` of every peer, block by block, and have `add` sum what each rank has.

        Args:
            slices: this rank's contributions to each rank.
            add: ({rank: its block}, where the block lies in the slice) -> None.
        """
        shown = self._board.show(slices, number, self.peers)
        if shown is not None:
            self._tell(shown, number)
            return [_Later(lambda: self._sum_shown(slices[self.rank], number, add))]
        self._offer(slices, number)

        def run() -> None:
            self._sum(slices[self.rank], number, add)
            for peer in self.peers:
                self.mailbox.send(peer, number + READ)

        return [self._reductions.start(run), self._all_have_read(number + READ, slices)]

    def all_reduce(
        self, buffer: Tensor, numbers: tuple[int, int], add: Callable[[Tensor], Add]
    ) -> list[Waitable]:
        """Sum a flat buffer over the ranks, in place.

        Args:
            numbers: of the terms, and of the sums.
            add: (where a sum goes) -> as in `reduce_scatter`.
        """
        shown = None
        if len(self.pids) == 2 or buffer.nbytes <= WHOLE:
            shown = self._board.show([buffer], numbers[0], self.peers)
        if shown is not None:
            self._tell(shown * len(self.pids), numbers[0])
            # of more than two terms sums are written before the last one is read
            mine = buffer if len(self.pids) == 2 else buffer.clone()
            return [_Later(lambda: self._sum_shown(mine, numbers[0], add(buffer)))]
        slices = list(buffer.tensor_split(len(self.pids)))
        return self._reduce_and_gather(slices, numbers, add(slices[self.rank]))

    def _reduce_and_gather(self, slices: list[Tensor], numbers: tuple[int, int], add: Add) -> list[Waitable]:
        """As reduce_scatter, with the sum in slices[rank]; then every rank reads the others' sums."""
        mine, (terms, sums) = slices[self.rank], numbers
        self._offer(slices, terms)

        def run() -> None:
            self._sum(mine, terms, add)
            self._offer([mine] * len(slices), sums)  # says, too, that this rank has read the terms
            for peer in self.peers:
                self._copy(peer, self.mailbox.receive(peer, sums), slices[peer])
                self.mailbox.send(peer, sums + READ)

        return [self._reductions.start(run), self._all_have_read(sums + READ, slices)]

    # ---- letters ----------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, number: int) -> list[Waitable]:
        """Offer a flat tensor to one peer; it may change when this was waited for."""
        number += LETTER
        shown = self._board.show([tensor], number, [peer])
        self.mailbox.send(peer, number, tensor.data_ptr() if shown is None else shown[0])
        return [_Reads(self.mailbox, [peer], number + READ, tensor)] if shown is None else []

    def receive(self, tensor: Tensor, peer: int, number: int) -> list[Waitable]:
        """Read what the peer sends under this number, when it is waited for."""
        number += LETTER

        def run() -> None:
            self._copy(peer, self.mailbox.receive(peer, number, spin=self._spin), tensor)
            self.mailbox.send(peer, number + READ)

        return [_Later(run)]

    # ---- parts of them ----------------------------------------------------------------------

    def _tell(self, places: Sequence[int], number: int) -> None:
        for peer in self.peers:
            self.mailbox.send(peer, number, places[peer])

    def _offer(self, slices: list[Tensor], number: int) -> None:
        self._tell([part.data_ptr() for part in slices], number)

    def _sum_shown(self, mine: Tensor, number: int, add: Add) -> None:
        terms = {self.rank: mine}
        for peer in self.peers:
            place = self.mailbox.receive(peer, number, spin=self._spin)
            if place < 0:
                terms[peer] = self._board.shown(peer, place, mine.numel(), mine.dtype)
            else:
                terms[peer] = torch.empty_like(mine)
                self._copy(peer, place, terms[peer])
        add(terms, slice(0, mine.numel()))
        for peer in self.peers:
            self.mailbox.send(peer, number + READ)

    def _sum(self, mine: Tensor, number: int, add: Add) -> None:
        places = {peer: self.mailbox.receive(peer, number) for peer in self.peers}
        size = min(BLOCK, mine.numel())
        scratch = {peer: torch.empty(size, dtype=mine.dtype) for peer in places}
        for start in range(0, mine.numel(), size):
            where = slice(start, min(start + size, mine.numel()))
            blocks = {self.rank: mine[where]}
            for peer, place in places.items():
                blocks[peer] = scratch[peer][: where.stop - start]
                self._copy(peer, place + start * mine.element_size(), blocks[peer])
            add(blocks, where)

    def _copy(self, peer: int, place: int, into: Tensor) -> None:
        if place < 0:
            self._board.read(peer, place, into)
        else:
            cross_memory.copy(self.pids[peer], place, into)

    def _all_have_read(self, number: int, offered: object) -> Waitable:
        return _Reads(self.mailbox, self.peers, number, offered)


def _mailbox(group: dist.ProcessGroup) -> ShmQueue | None:
    try:
        return ShmQueue(group.rank(), group.size(), arena.BYTES)
    except OSError:
        return None


def _connected(mailbox: ShmQueue | None, every: list[tuple[str, int, Any]]) -> str | None:
    """Connect the mailbox; gives why that, or reading the others' memory, is not possible."""
    if mailbox is None or any(address is None for _, _, address in every):
        return "a rank could not get memory to share"
    problem = cross_memory.problem([(machine, address.pid, probe) for machine, probe, address in every])
    if problem is not None:
        return problem
    try:
        mailbox.connect([address for _, _, address in every])
    except OSError as error:
        return f"the mailbox of another rank cannot be mapped: {error}"
    return None


def _local_ranks(degree: int) -> int:
    """Ranks on this machine, as far as is known."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or degree)


class _Later:
    """Work that is done by who waits for it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with torch.no_grad():
                run()


class _Reads:
    """That every peer has read what was offered, which lives until then."""

    def __init__(self, mailbox: ShmQueue, peers: list[int], number: int, offered: object) -> None:
        self._mailbox, self._peers, self._number, self._offered = mailbox, peers, number, offered

    def wait(self) -> None:
        for peer in self._peers:
            self._mailbox.receive(peer, self._number)
