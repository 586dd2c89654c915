"""The check that nodes reach one another: each opens a port, says a word to who connects, and tries the others' ports.

The word tells that it was the right node that answered: the same private address is often found on many machines.
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
"""How long a try to connect may take."""
SETTLE_S = 0.5
"""How long other addresses of a host are tried when one has answered."""
NAMES_S = 2.0
"""How much longer a name service may take than a connection."""
WAITING = f"no answer within {REACH_S:g} s"
"""What is said of an address that has not answered, yet or at all."""


class ProbeServer:
    """A port that is open for the tries of others. That of the first node is held for its rank 0, which takes it."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._held: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def open(self, addr: str, port: int, word: str) -> Message:
        """Take a port: a free one for 0. `addr` empty means all addresses. Returns `port`, or `problem`."""
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
        """Answer no more. A port that was picked stays ours: bound, but not listened to, it is given to nobody who asks
        for a free one or connects somewhere, and rank 0 can take it as servers do (SO_REUSEADDR)."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        self._thread.join()
        self._server = self._thread = None

    def close(self) -> None:
        """Give the port back."""
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
    """Answer everybody until `server` is shut down."""
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
                        time.sleep(0.01)  # who came has gone again, or there are too many
                        continue
                    sockets.enter_context(peer)
                    waiting.register(peer, selectors.EVENT_READ)
                    with contextlib.suppress(OSError):
                        peer.sendall(word)
                else:  # who came closes first, so that the port does not linger in TIME_WAIT here
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]


class ProbeClient:
    """Tries to reach other nodes, while the agent goes on listening to the front end.

    Args:
        targets: of each its `addresses`, `port` and `word`.
    """

    def __init__(self, targets: Sequence[Message]) -> None:
        self._began = time.monotonic()
        # Of each target what its addresses said: None where the right node answered.
        self._said: list[dict[str, str | None]] = [dict.fromkeys(t["addresses"], WAITING) for t in targets]
        for target, said in zip(targets, self._said, strict=True):
            for address in said:
                threading.Thread(target=_note, args=(said, address, target), daemon=True).start()

    def found(self) -> list[Message] | None:
        """Return for each target the `addresses` that answered, and `why` another did not; None while tries go on."""
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
    """Return why the node with that word cannot be reached at an address; None where it can."""
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as connection:
            heard = connection.recv(len(word), socket.MSG_WAITALL)
    except TimeoutError:
        return WAITING
    except OSError as error:
        return error.strerror or str(error)
    return None if heard == word.encode() else "another program answers there"
