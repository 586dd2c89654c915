"""Connectivity check of the nodes: each opens a port, answers peers with a word, and tries others' ports.

The word proves that the right node has answered: many machines may use the same private address.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from launcher.cluster.wire import Message

REACH_S = 3.0
"""How long an attempt to connect may take."""
SETTLE_S = 0.5
"""How long to keep trying other addresses of a host once one has answered."""
NAMES_S = 2.0
"""How much longer than a connection a name lookup may take."""
WAITING = f"no answer within {REACH_S:g} s"
"""The result for an address that has not answered, yet or at all."""


class ProbeServer:
    """A port that is open for probes by other nodes. The port of the first node is held for its rank 0."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._held: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def open(self, addr: str, port: int, word: str) -> Message:
        """Open a port, a free one if `port` is 0; an empty `addr` means all addresses. Return `port` or
        `problem`."""
        self.close()
        try:
            if not port:
                self._held = _bound(addr, 0)
                port = self._held.getsockname()[1]
            server = _bound(addr, port)
            server.listen(1024)
        except OSError as error:
            self.close()
            return {"problem": error.strerror or str(error)}
        self._server = server
        self._thread = threading.Thread(target=_say_to_all, args=(server, word.encode()), daemon=True)
        self._thread.start()
        return {"port": server.getsockname()[1]}

    def leave(self) -> None:
        """Stop answering.

        A port that was picked stays reserved: it is bound but not listened on, so that no program that
        requests a free port or connects somewhere gets it, and rank 0 can bind it as servers do
        (SO_REUSEADDR).
        """
        if self._server is None or self._thread is None:
            return
        self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        self._thread.join()
        self._server = self._thread = None

    def close(self) -> None:
        """Release the port."""
        self.leave()
        if self._held is not None:
            self._held.close()
            self._held = None


def _bound(addr: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((addr, port))
    except OSError:
        made.close()
        raise
    return made


def _say_to_all(server: socket.socket, word: bytes) -> None:
    """Answer every peer until `server` is shut down."""
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as sockets:
        sockets.enter_context(server)
        waiting.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is server:
                    try:
                        peer, _ = server.accept()
                    except OSError as error:
                        if error.errno in (errno.EINVAL, errno.EBADF):
                            return
                        time.sleep(0.01)  # the peer is gone again, or too many are connected
                        continue
                    sockets.enter_context(peer)
                    waiting.register(peer, selectors.EVENT_READ)
                    with contextlib.suppress(OSError):
                        peer.sendall(word)
                else:  # the peer closes first, so that the port does not linger in TIME_WAIT here
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]


class ProbeClient:
    """Tries to reach other nodes, while the agent keeps listening to the front end.

    Args:
        targets: `addresses`, `port` and `word` of each node.
    """

    def __init__(self, targets: Sequence[Message]) -> None:
        self._began = time.monotonic()
        # For each target, the result per address: None if the right node answered.
        self._said: list[dict[str, str | None]] = [dict.fromkeys(t["addresses"], WAITING) for t in targets]
        for target, said in zip(targets, self._said, strict=True):
            for address in said:
                threading.Thread(target=_note, args=(said, address, target), daemon=True).start()

    def found(self) -> list[Message] | None:
        """Return, for each target, the `addresses` that answered and `why` another one did not; None while
        attempts are running."""
        took = time.monotonic() - self._began
        if took < REACH_S + NAMES_S and any(
            WAITING in said.values() and not (None in said.values() and took > SETTLE_S)
            for said in self._said
        ):
            return None
        return [
            {
                "addresses": [address for address, why in said.items() if why is None],
                "why": next((why for why in said.values() if why is not None), None),
            }
            for said in self._said
        ]


def _note(said: dict[str, str | None], address: str, target: Message) -> None:
    said[address] = why_not(address, target["port"], target["word"])


def why_not(address: str, port: int, word: str) -> str | None:
    """Return why the node with that word cannot be reached at an address; None if it can."""
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as connection:
            heard = connection.recv(len(word), socket.MSG_WAITALL)
    except TimeoutError:
        return WAITING
    except OSError as error:
        return error.strerror or str(error)
    return None if heard == word.encode() else "another program answers there"
