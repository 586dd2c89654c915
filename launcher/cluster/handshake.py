"""Mutual authentication of a TCP connection by a shared token, and signatures on every line sent over it.

    caller    NONCE                                   the side that connects
    listener  NONCE                                   the side that waits; no more before the caller's proof
    caller    CLAIM PROOF("caller", CLAIM)            CLAIM: which node it is
    listener  PROOF("listener", CLAIM)

A proof is the HMAC of role, both nonces and claim, so that it is useless for the other side, another node or
another connection. Lines are signed with keys derived from the token and the nonces, and numbered: a man in
the middle can cut the stream, but cannot change, add, repeat or drop a line. It can read them, so no secret
may be sent (`secret.py`).

Uses only the standard library: `dial.py` sends this source to nodes where this package may not be installed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from typing import NoReturn

ANSWER_S = 5.0
"""How long an unauthenticated peer may take to prove itself."""
MOST_STRANGERS = 256
LONGEST = 200
"""Most bytes of a line before the proof."""
LONGEST_HELLO = 1 << 26
NONCE = 32
SIGN = 64


class MessageSigner:
    """Signs the lines of one direction, or verifies them. Every line is numbered."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def closed(self, text: bytes) -> bytes:
        """Return `text` preceded by its signature."""
        return self._next(text) + text

    def opened(self, line: bytes) -> bytes:
        """Verify a line and return its text.

        Raises:
            ValueError: it is not what the other side sent next.
        """
        signed, text = bytes(line[:SIGN]), bytes(line[SIGN:])
        if not hmac.compare_digest(signed, self._next(text)):
            raise ValueError("a line that the other side has not signed")
        return text

    def _next(self, text: bytes) -> bytes:
        self._count += 1
        return _hmac(self._key, b"%d " % self._count, text).encode()


class SignedSession:
    """The result of a handshake: signers for sent and received lines, and the caller's claim."""

    def __init__(self, token: str, nonces: tuple[str, str], claim: str, is_caller: bool) -> None:
        caller, listener = (
            bytes.fromhex(proof(token, role, nonces, claim))
            for role in ("caller's lines", "listener's lines")
        )
        mine, other = (caller, listener) if is_caller else (listener, caller)
        self.sends, self.takes, self.claim = MessageSigner(mine), MessageSigner(other), claim


def proof(token: str, role: str, nonces: tuple[str, str], claim: str) -> str:
    return _hmac(token.encode(), "\n".join((role, *nonces, claim)).encode())


def call(connection: socket.socket, token: str, claim: str, limit_s: float) -> SignedSession:
    """Perform the caller's side of the handshake on a connected socket.

    Raises:
        OSError: the other side is silent or gone.
        ValueError: the other side does not know the token, or does not accept this claim.
    """
    until, mine = time.monotonic() + limit_s, secrets.token_hex(NONCE // 2)
    connection.settimeout(limit_s)
    connection.sendall(mine.encode() + b"\n")
    nonces = mine, read_line(connection, until)
    if len(nonces[1]) != NONCE:
        raise ValueError("no nonce")
    connection.sendall((claim + " " + proof(token, "caller", nonces, claim) + "\n").encode())
    if not hmac.compare_digest(read_line(connection, until), proof(token, "listener", nonces, claim)):
        raise ValueError("another token")
    return SignedSession(token, nonces, claim, True)


def read_line(connection: socket.socket, until: float) -> str:
    """Read one line and return it without its end. Nothing beyond it is consumed.

    Raises:
        OSError: it did not arrive before `until` (time.monotonic).
        ValueError: there is none, or it is too long.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, until - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) > LONGEST:
            raise ValueError("no line")
        line += byte
    return line[:-1].decode("ascii")


class PendingConnection:
    """The listener's side of one handshake; never blocks."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection, self.until = connection, time.monotonic() + ANSWER_S
        self.session: SignedSession | None = None
        self._token, self._rest = token, b""
        self._nonces: tuple[str, str] | None = None
        connection.setblocking(False)

    def hear(self) -> None:
        """Process what has arrived; `session` is set once the peer has proved itself.

        Raises:
            OSError: the peer is gone.
            ValueError: the peer does not know the token.
        """
        data = self.connection.recv(LONGEST)
        self._rest += data
        if not data or len(self._rest) > 2 * LONGEST:
            raise ValueError("no handshake")
        while b"\n" in self._rest and self.session is None:
            line, _, self._rest = self._rest.partition(b"\n")
            self._answer(line.decode("ascii"))

    def _answer(self, line: str) -> None:
        if self._nonces is None:
            if len(line) != NONCE:
                raise ValueError("no nonce")
            self._nonces = line, secrets.token_hex(NONCE // 2)
            self.connection.sendall(self._nonces[1].encode() + b"\n")
            return
        claim, _, proved = line.partition(" ")
        if not hmac.compare_digest(proved, proof(self._token, "caller", self._nonces, claim)) or self._rest:
            raise ValueError("another token")
        self.connection.sendall(proof(self._token, "listener", self._nonces, claim).encode() + b"\n")
        self.session = SignedSession(self._token, self._nonces, claim, False)


def callers(
    server: socket.socket, token: str, until: float = float("inf")
) -> Iterator[tuple[socket.socket, SignedSession]]:
    """Yield (connection, session) for each authenticated peer of a listening socket.

    A peer that sends nothing, half a line or garbage delays no other peer: all handshakes run concurrently,
    each within `ANSWER_S`, and if there are too many the oldest is dropped.

    Args:
        until: when to stop (time.monotonic).
    """
    strangers: dict[socket.socket, PendingConnection] = {}
    server.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(server, selectors.EVENT_READ)

        def drop(stranger: PendingConnection) -> None:
            waiting.unregister(stranger.connection)
            del strangers[stranger.connection]
            stranger.connection.close()

        while time.monotonic() < until:
            ready = {key.fileobj for key, _ in waiting.select(0.2)}
            if server in ready:
                try:
                    connection, _ = server.accept()
                except OSError:  # the peer is gone again, or too many are connected
                    time.sleep(0.01)
                else:
                    if len(strangers) >= MOST_STRANGERS:
                        drop(next(iter(strangers.values())))
                    strangers[connection] = PendingConnection(connection, token)
                    waiting.register(connection, selectors.EVENT_READ)
            for stranger in [s for s in strangers.values() if s.connection in ready]:
                try:
                    stranger.hear()
                except (OSError, ValueError):
                    drop(stranger)
                    continue
                if stranger.session is not None:
                    waiting.unregister(stranger.connection)
                    del strangers[stranger.connection]
                    stranger.connection.setblocking(True)
                    yield stranger.connection, stranger.session
            for stranger in [s for s in strangers.values() if s.until < time.monotonic()]:
                drop(stranger)
        for stranger in strangers.values():
            stranger.connection.close()


def serve_at(connection: socket.socket, session: SignedSession) -> NoReturn:
    """Become the agent of the front end on this connection, whose first line contains the code
    (`bootstrap.py`)."""
    connection.settimeout(None)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    with open(0, "rb", 0, closefd=False) as stream:
        hello = json.loads(session.takes.opened(stream.readline(LONGEST_HELLO)[:-1]))
    hello["session"] = session
    exec(compile(hello["code"], "bootstrap.py", "exec"), {"hello": hello, "__name__": "bootstrap"})
    raise SystemExit(1)


def _hmac(key: bytes, *parts: bytes) -> str:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.hexdigest()
