"""A server in the front end that tells all ranks which replicas train together (`membership.py`).

Ranks connect, prove that they know the run's secret, and keep the connection open; when it closes, the rank
has died. Each line is a JSON object preceded by its signature (`handshake.py`).

    rank    {"is": "ask", "step", "kind", "has_result", "address"}, {"is": "end"}, {"is": "written"}
    front   {"is": "epoch", ...}, {"is": "waiting", "epoch"}, {"is": "write"}, {"is": "over"},
            {"is": "expelled"}
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from dataclasses import dataclass

from launcher.cluster import handshake
from launcher.cluster.handshake import SignedSession
from launcher.cluster.membership import Membership, Message, Question

TICK_S = 0.5
logger = logging.getLogger("launcher")


@dataclass
class Line:
    """The connection of one rank."""

    connection: socket.socket
    session: SignedSession
    replica: int
    rank: int
    attempt: int

    def say(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the rank is gone; `_read` notices
            self.connection.sendall(self.session.sends.closed(json.dumps(message).encode()) + b"\n")


class Coordinator:
    """Serves the ranks of all replicas until `close`.

    Args:
        server: a listening socket.
        secret: shared by all ranks.
        membership: makes the decisions.
    """

    def __init__(self, server: socket.socket, secret: str, membership: Membership) -> None:
        self.membership = membership
        self._server, self._secret = server, secret
        self._lines: dict[tuple[int, int], Line] = {}
        self._lock = threading.Lock()
        self._members: list[int] = []
        self._closed = threading.Event()
        for work in self._accept, self._tick:
            threading.Thread(target=work, daemon=True).start()

    def ended(self, replica: int) -> None:
        """Record that the front end of a replica has ended."""
        with self._lock:
            self.membership.ended(replica)
            self._decide()

    def admit_nobody(self) -> None:
        """Admit no more replicas because the run is being stopped: a replica that starts now ends at once."""
        with self._lock:
            self.membership.closed = True
            self._decide()

    def close(self) -> None:
        self._closed.set()
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the server was closed
            for connection, session in handshake.callers(self._server, self._secret):
                replica, rank, attempt = map(int, session.claim.split("."))
                line = Line(connection, session, replica, rank, attempt)
                threading.Thread(target=self._read, args=(line,), daemon=True).start()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                self._decide()

    def _read(self, line: Line) -> None:
        connection = line.connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._lines[line.replica, line.rank] = line
            self.membership.connected(line.replica, line.rank, line.attempt)
        try:
            with connection, connection.makefile("rb") as stream:
                for text in stream:
                    message = json.loads(line.session.takes.opened(text[:-1]))
                    with self._lock:
                        if self.membership.is_current(line.replica, line.attempt):
                            self._take(line, message)
                            self._decide()
        except (OSError, ValueError) as error:
            logger.debug("replica %d rank %d: %s", line.replica, line.rank, error)
        finally:
            with self._lock:
                self.membership.gone(line.replica, line.attempt)
                self._decide()

    def _take(self, line: Line, message: Message) -> None:
        match message["is"]:
            case "ask":
                question = Question(
                    message["step"], message["kind"], message["has_result"], tuple(message["address"])
                )
                self.membership.asked(line.replica, line.rank, question, time.monotonic())
            case "end":
                self.membership.at_the_end(line.replica, line.rank)
            case "written":
                self.membership.has_written()

    def _decide(self) -> None:
        for replica, rank, message in self.membership.decide(time.monotonic()):
            if (line := self._lines.get((replica, rank))) is not None:
                line.say(message)
            if message["is"] == "epoch" and message["members"] != self._members:
                self._say(message["members"])

    def _say(self, members: list[int]) -> None:
        """Log which replicas train together, when that changes."""
        before, self._members = self._members, members
        count = len(self.membership.replicas)
        if before or len(members) < count:
            names = ", ".join(map(str, members))
            how = (
                f"replicas {names} of {count} train together"
                if members[1:]
                else f"replica {names} trains alone"
            )
            logger.info("%s", how)
