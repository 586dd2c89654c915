"""Collectives between CPU ranks of one machine: each reads what it needs straight out of its peers' memory.

Loopback sockets copy every byte twice through the kernel. Linux can copy once, from one process into another
(process_vm_readv, the "cross memory attach" of MPI libraries). Messages (`mailbox.py`) only say where data lies and
that it was read:

    offer   "my buffer is ready, at this address"       (a reader needs it before it reads)
    read    "I have read what I need of your buffer"    (its owner needs it before it changes the buffer)

A thread for gathers and one for reductions do the reading, so a rank gives and takes while its main thread computes.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.mailbox import Mailbox

BLOCK = 1 << 18  # elements summed at a time: what was read is still in the cache when it is added
READ = 2  # a message's number plus this is that of its "read"
_PR_SET_PTRACER = 0x59616D61
Add = Callable[[dict[int, Tensor], slice], None]


class Waitable(Protocol):
    """What can be waited for."""

    def wait(self) -> Any: ...


class Unreadable(Exception):
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

    def __init__(self, rank: int, pids: list[int], mailbox: Mailbox) -> None:
        self.rank, self.pids, self.mailbox = rank, pids, mailbox
        self.peers = peers_of(rank, len(pids))
        self._gathers, self._reductions = _Worker(), _Worker()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> PeerMemory:
        """Try whether all ranks of `group` can read each other. Collective.

        Raises:
            Unreadable: some rank cannot, on every rank alike.
        """
        if sys.platform != "linux":
            raise Unreadable("only Linux lets a process read another's memory")
        _allow_siblings()
        probe, mailbox = torch.tensor([os.getpid()]), Mailbox(group.rank())
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, (_machine(), probe.data_ptr(), mailbox.address), group=group)
        problem = _problem([(machine, box.pid, address) for machine, address, box in every])
        problems: list[Any] = [None] * group.size()
        dist.all_gather_object(problems, problem, group=group)  # the probe must live until all have read it
        found = [text for text in problems if text]
        if found:
            raise Unreadable(found[0])
        mailbox.connect([box for _, _, box in every])
        return cls(group.rank(), [box.pid for _, _, box in every], mailbox)

    def gather(self, slices: list[Tensor], number: int) -> list[Waitable]:
        """Read every peer's slice into its place; slices[rank] is what the peers read."""
        self._offer([slices[self.rank]] * len(slices), number)

        def run() -> None:
            for peer in self.peers:
                self._copy(peer, self.mailbox.receive(peer, number), slices[peer])
                self.mailbox.send(peer, number + READ)

        return [self._gathers.start(run), self._all_have_read(number + READ)]

    def reduce_scatter(self, slices: list[Tensor], number: int, add: Add) -> list[Waitable]:
        """Read slice `rank` of every peer, block by block, and have `add` sum what each rank has.

        Args:
            slices: this rank's contributions to each rank.
            add: ({rank: its block}, where the block lies in the slice) -> None.
        """
        self._offer(slices, number)

        def run() -> None:
            self._sum(slices[self.rank], number, add)
            for peer in self.peers:
                self.mailbox.send(peer, number + READ)

        return [self._reductions.start(run), self._all_have_read(number + READ)]

    def all_reduce(self, slices: list[Tensor], numbers: tuple[int, int], add: Add) -> list[Waitable]:
        """As reduce_scatter, with the sum in slices[rank]; then every rank reads the others' sums."""
        mine, (terms, sums) = slices[self.rank], numbers
        self._offer(slices, terms)

        def run() -> None:
            self._sum(mine, terms, add)
            self._offer([mine] * len(slices), sums)  # says, too, that this rank has read the terms
            for peer in self.peers:
                self._copy(peer, self.mailbox.receive(peer, sums), slices[peer])
                self.mailbox.send(peer, sums + READ)

        return [self._reductions.start(run), self._all_have_read(sums + READ)]

    def exchange(self, buffer: Tensor, number: int, add: Add) -> list[Waitable]:
        """An all-reduce in one round: every rank reads its peers' buffers whole and sums them. Two ranks read as much
        as in two rounds, and wait half as often."""
        self._offer([buffer] * (len(self.peers) + 1), number)

        def run() -> None:
            terms = {self.rank: buffer}
            for peer in self.peers:
                terms[peer] = torch.empty_like(buffer)
                self._copy(peer, self.mailbox.receive(peer, number), terms[peer])
                self.mailbox.send(peer, number + READ)
            self._all_have_read(number + READ).wait()
            for start in range(0, buffer.numel(), BLOCK):
                where = slice(start, start + BLOCK)
                add({rank: term[where] for rank, term in terms.items()}, where)

        return [self._reductions.start(run)]

    def _offer(self, slices: list[Tensor], number: int) -> None:
        for peer in self.peers:
            self.mailbox.send(peer, number, slices[peer].data_ptr())

    def _sum(self, mine: Tensor, number: int, add: Add) -> None:
        addresses = {peer: self.mailbox.receive(peer, number) for peer in self.peers}
        size = min(BLOCK, mine.numel())
        scratch = {peer: torch.empty(size, dtype=mine.dtype) for peer in addresses}
        for start in range(0, mine.numel(), size):
            where = slice(start, min(start + size, mine.numel()))
            blocks = {self.rank: mine[where]}
            for peer, address in addresses.items():
                blocks[peer] = scratch[peer][: where.stop - start]
                self._copy(peer, address + start * mine.element_size(), blocks[peer])
            add(blocks, where)

    def _copy(self, peer: int, address: int, into: Tensor) -> None:
        _copy(self.pids[peer], address, into)

    def _all_have_read(self, number: int) -> Waitable:
        return _Reads(self.mailbox, self.peers, number)


class _Reads:
    """That every peer has read what was offered."""

    def __init__(self, mailbox: Mailbox, peers: list[int], number: int) -> None:
        self._mailbox, self._peers, self._number = mailbox, peers, number

    def wait(self) -> None:
        for peer in self._peers:
            self._mailbox.receive(peer, self._number)


class _Worker:
    """A thread that runs one job after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def start(self, run: Callable[[], None]) -> _Job:
        """Have the thread call `run`."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="peer-memory")
            self._thread.start()
        job = _Job(run)
        self._jobs.put(job)
        return job


class _Job:
    """A call in the thread; waiting for it raises what it raised."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: BaseException | None = None

    def __call__(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        try:
            with torch.no_grad():
                run()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or its buffers would live until the next one


# ---- the system calls ---------------------------------------------------------------------------


class _Region(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    region = ctypes.POINTER(_Region)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = [
        ctypes.c_int, region, ctypes.c_ulong, region, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
    return library


def _copy(pid: int, address: int, into: Tensor) -> None:
    library = _library()
    done, size, start = 0, into.numel() * into.element_size(), into.data_ptr()
    while done < size:
        here, there = _Region(start + done, size - done), _Region(address + done, size - done)
        count = library.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")
        done += count


def _allow_siblings() -> None:
    """Where only ancestors may read a process (Yama), name our parent: its other children may, too."""
    _library().prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def _machine() -> str:
    """The running kernel and the process namespace: numbers of processes mean the same where both are the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.getpid()}"


def _problem(every: list[tuple[str, int, int]]) -> str | None:
    if len({machine for machine, _, _ in every}) > 1:
        return "the ranks are not on one machine"
    value = torch.zeros(1, dtype=torch.int64)
    try:
        for _, pid, address in every:
            _copy(pid, address, value)
            if int(value) != pid:
                return f"process {pid} is not what it seems"
    except OSError as error:
        return str(error)
    return None
