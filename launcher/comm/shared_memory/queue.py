"""Message queues between processes of one machine: ring buffers of numbers in shared memory.

A message takes microseconds.

Every process owns a mailbox: memory without a file (memfd), which the kernel frees when the last of its
processes ends, however it ends. Peers map it through /proc. It contains a ring for each of them, and a
`board` for other data that its owner publishes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.comm.shared_memory.semaphore import BYTES, Semaphore
from launcher.errors import LauncherError

LIMIT_S = 600.0  # as long as torch.distributed waits for a peer
LOOK_S = 1.0  # between checks of whether the peer is alive
SPINS = 400  # tries before sleeping: about 0.2 ms, the cost of sleeping and waking on a virtual machine
PLACES = 8192  # per ring; a sender that finds it full waits until its peer has read a message
_MESSAGE = struct.Struct("qq")  # number, value
_RING = 2 * BYTES + PLACES * _MESSAGE.size  # (messages, free places), ring


@dataclass(frozen=True)
class ShmQueueAddress:
    """The address of a queue: a file descriptor of its process."""

    pid: int
    descriptor: int


class ShmQueue:
    """Sends messages to peers and receives theirs; each carries the number of the operation it belongs to.

    Args:
        rank: of this process among the peers.
        ranks: number of ranks, this one included.
        board: bytes that the owner writes and all ranks read.
    """

    def __init__(self, rank: int, ranks: int, board: int = 0) -> None:
        self.rank, self.ranks = rank, ranks
        self._descriptor = os.memfd_create("launcher-mailbox", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, ranks * _RING + board)
        self._memory = mmap.mmap(self._descriptor, 0)
        self.address = ShmQueueAddress(os.getpid(), self._descriptor)
        self._inboxes = [_Inbox(_Ring(self._memory, sender)) for sender in range(ranks)]
        for inbox in self._inboxes:
            inbox.ring.start()
        self._peers: list[ShmQueueAddress] = []
        self._outgoing: list[_Outgoing] = []
        self.boards: list[tuple[mmap.mmap, int]] = []  # per rank: memory, and offset of the board in it

    def connect(self, peers: list[ShmQueueAddress]) -> None:
        """Map the mailbox of every rank; `peers`: their addresses.

        Raises:
            OSError: the kernel does not permit it.
        """
        memories = [self._memory if a == self.address else _mapped(a) for a in peers]
        self._peers = peers
        self._outgoing = [_Outgoing(_Ring(memory, self.rank)) for memory in memories]
        self.boards = [(memory, self.ranks * _RING) for memory in memories]

    def all_are_connected(self) -> None:
        """Close the descriptor of the memory, so that no other process can map it."""
        os.close(self._descriptor)

    def pid_of(self, peer: int) -> int:
        """Return the process id of a rank."""
        return self._peers[peer].pid

    def send(self, peer: int, number: int, value: int = 0) -> None:
        """Send `value`; the peer can read it when this returns."""
        out = self._outgoing[peer]
        with out.lock:
            if not out.ring.free.taken():
                self._wait(out.ring.free, peer, spin=False)
            out.ring.write(number, value)

    def receive(self, peer: int, number: int, *, spin: bool = False) -> int:
        """Wait for the peer's message of this number, and return its value.

        Args:
            spin: the message is expected at once: spin briefly before sleeping.

        Raises:
            LauncherError: the peer's process has ended, or was silent for LIMIT_S.
        """
        inbox = self._inboxes[peer]
        with inbox.changed:
            while inbox.led and number not in inbox.box:
                inbox.changed.wait()
            if number in inbox.box:
                return inbox.box.pop(number)
            inbox.led = True
        # Of the threads that wait for this peer, one takes messages from the ring, for itself and the others.
        try:
            while True:
                self._wait(inbox.ring.messages, peer, spin=spin)
                found, value = inbox.ring.read()
                if found == number:
                    return value
                with inbox.changed:
                    inbox.box[found] = value
                    inbox.changed.notify_all()
        finally:
            with inbox.changed:
                inbox.led = False
                inbox.changed.notify_all()

    def has(self, peer: int, number: int) -> bool:
        """Return whether the peer's message of this number has arrived."""
        inbox = self._inboxes[peer]
        with inbox.changed:
            while not inbox.led and inbox.ring.messages.taken():
                found, value = inbox.ring.read()
                inbox.box[found] = value
            return number in inbox.box

    def _wait(self, semaphore: Semaphore, peer: int, *, spin: bool) -> None:
        if spin:
            for _ in range(SPINS):
                if semaphore.taken():
                    return
        until = time.monotonic() + LIMIT_S
        while not semaphore.wait(LOOK_S):
            self._check(peer, until)

    def _check(self, peer: int, until: float) -> None:
        pid = self.pid_of(peer)
        if not _lives(pid):
            raise LauncherError(f"rank {peer} of the axis (process {pid}) has ended", fix="see its log")
        if time.monotonic() > until:
            raise LauncherError(
                f"nothing was received from rank {peer} of the axis (process {pid}) for {LIMIT_S:g} s",
                fix="check its log; all ranks must run the same collectives",
            )


class _Ring:
    """Ring buffer of one sender's messages, in the memory of their receiver."""

    def __init__(self, memory: mmap.mmap, sender: int) -> None:
        self._memory, self._start = memory, sender * _RING + 2 * BYTES
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + sender * _RING
        self.messages, self.free = Semaphore(address), Semaphore(address + BYTES)
        self._turn = 0

    def start(self) -> None:
        self.messages.start(0)
        self.free.start(PLACES)

    def write(self, number: int, value: int) -> None:
        _MESSAGE.pack_into(self._memory, self._place(), number, value)
        self.messages.post()

    def read(self) -> tuple[int, int]:
        number, value = _MESSAGE.unpack_from(self._memory, self._place())
        self.free.post()
        return number, value

    def _place(self) -> int:
        self._turn += 1
        return self._start + (self._turn % PLACES) * _MESSAGE.size


class _Inbox:
    """The messages that arrived from one peer."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.box: dict[int, int] = {}
        self.changed = threading.Condition()
        self.led = False  # whether a thread is taking messages from the ring


class _Outgoing:
    """The ring to one peer, and its lock."""

    def __init__(self, ring: _Ring) -> None:
        self.ring, self.lock = ring, threading.Lock()


def _mapped(address: ShmQueueAddress) -> mmap.mmap:
    descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _lives(pid: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
