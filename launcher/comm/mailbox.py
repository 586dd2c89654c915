"""Numbers sent between processes of one machine, in tens of microseconds: Unix datagrams, taken in by a thread.

The thread only takes in and never sends. So a sender never waits for long, whatever its peers are busy with.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass

from launcher.errors import LauncherError

LIMIT_S = 600.0  # as long as torch.distributed waits for a peer
_FORMAT = struct.Struct("<QIqq")  # secret, sender, number of the message, value


@dataclass(frozen=True)
class Address:
    """Where a mailbox takes messages, and the secret that they must know; other users' processes could send, too."""

    pid: int
    name: bytes
    secret: int


class Mailbox:
    """Messages of the peers, each with the number of what it belongs to.

    Args:
        rank: of this process among the peers.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # Linux picks a name that is in no directory
        self.address = Address(os.getpid(), self._socket.getsockname(), secrets.randbits(64))
        self._peers: list[Address] = []
        self._box: dict[tuple[int, int], int] = {}
        self._arrived = threading.Condition()
        taking = (self._socket, self.address.secret, self._box, self._arrived)
        threading.Thread(target=_take_in, args=taking, daemon=True, name="mailbox").start()
        weakref.finalize(self, _close, self._socket)

    def connect(self, peers: list[Address]) -> None:
        """`peers`: the address of every rank."""
        self._peers = peers

    def send(self, peer: int, number: int, value: int = 0) -> None:
        """Send `value`; it is there when this returns."""
        to = self._peers[peer]
        message = _FORMAT.pack(to.secret, self.rank, number, value)
        try:
            self._socket.sendto(message, to.name)
        except OSError as error:
            raise _gone(peer, to) from error

    def receive(self, peer: int, number: int) -> int:
        """The value of the peer's message of this number; waits for it.

        Raises:
            LauncherError: the peer's process has ended, or was silent for LIMIT_S.
        """
        until = time.monotonic() + LIMIT_S
        with self._arrived:
            while (peer, number) not in self._box:
                if not self._arrived.wait(1.0):
                    self._check(peer, until)
            return self._box.pop((peer, number))

    def _check(self, peer: int, until: float) -> None:
        try:
            os.kill(self._peers[peer].pid, 0)
        except ProcessLookupError as error:
            raise _gone(peer, self._peers[peer]) from error
        if time.monotonic() > until:
            raise LauncherError(
                f"no word from rank {peer} of the axis (process {self._peers[peer].pid}) for {LIMIT_S:g} s",
                fix="see in its log what it is doing; ranks must run the same collectives",
            )


def _gone(peer: int, address: Address) -> LauncherError:
    return LauncherError(f"rank {peer} of the axis (process {address.pid}) has ended", fix="see its log")


def _take_in(
    sock: socket.socket, secret: int, box: dict[tuple[int, int], int], arrived: threading.Condition
) -> None:
    while message := sock.recv(_FORMAT.size + 1):
        if len(message) != _FORMAT.size:
            continue
        known, sender, number, value = _FORMAT.unpack(message)
        if known == secret:
            with arrived:
                box[sender, number] = value
                arrived.notify_all()


def _close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)  # ends the thread
    sock.close()
