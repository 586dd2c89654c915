"""The language of front end and agents: one JSON object a line, over the pipes of the command that starts the agent.

A line of ours begins with a mark, so that what a login shell prints is not taken for one. Bytes that a rank prints
travel as text with surrogate escapes and arrive as they were. On a TCP connection each line is signed (`handshake.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from launcher.cluster.handshake import MessageSigner

MARK = b"\x1e"  # RS, as in JSON text sequences (RFC 7464)
ENOUGH = 1 << 20
NOISE_KEPT = 20
LONGEST = 1 << 26
"""Bytes of a line; no message comes near it."""
Message = dict[str, Any]


def encoded(message: Message, seal: MessageSigner | None = None, mark: bytes = MARK) -> bytes:
    """Return a line with its mark and its end."""
    text = json.dumps(message).encode()
    return mark + (text if seal is None else seal.closed(text)) + b"\n"


def text_of(data: bytes) -> str:
    return data.decode("utf-8", errors="surrogateescape")


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


class MessageReader:
    """Messages from a file descriptor that does not block.

    Attributes:
        noise: the last lines that were no messages: a shell's greeting, or its complaint.
        ended: nobody writes any more, or what cannot be believed: `forged`.
    """

    def __init__(self, fd: int, seal: MessageSigner | None = None) -> None:
        self.fd, self._seal = fd, seal
        self.forged = False
        self.noise: list[str] = []
        self.ended = False
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> list[Message]:
        """Return what has arrived since; of much only a part, so that the caller can do something else in between."""
        messages: list[Message] = []
        taken = 0
        while not self.ended and taken < ENOUGH:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            taken += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line, messages)
            if self.forged or len(self._rest) > LONGEST:
                self.ended, self._rest = True, b""
        return messages

    def _take(self, line: bytes, messages: list[Message]) -> None:
        before, mark, text = line.partition(MARK)
        if before.strip():
            self.noise = [*self.noise, before.decode(errors="replace").rstrip()][-NOISE_KEPT:]
        if mark and self._seal is not None and not self.forged:
            try:
                text = self._seal.opened(text)
            except ValueError:
                self.forged = True
        if mark and not self.forged:
            with contextlib.suppress(ValueError):
                messages.append(json.loads(text))


class MessageWriter:
    """Messages to a file descriptor; what it does not take at once waits.

    Nobody may be held up by a peer that does not read: neither the front end by a cut node, nor an agent by a cut
    front end.
    """

    def __init__(self, fd: int, seal: MessageSigner | None = None) -> None:
        self.fd, self._seal = fd, seal
        self.broken = False
        self._waiting = bytearray()
        os.set_blocking(fd, False)

    @property
    def full(self) -> bool:
        """Return whether so much waits that more output of ranks should stay where it is."""
        return len(self._waiting) > ENOUGH

    @property
    def waiting(self) -> bool:
        return bool(self._waiting) and not self.broken

    def send(self, message: Message) -> None:
        if not self.broken:
            self._waiting += encoded(message, self._seal)
            self.flush()

    def send_plain(self, message: Message) -> None:
        """Send a line without a mark, for who does not know of marks yet."""
        self._waiting += encoded(message, self._seal, mark=b"")
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        try:
            while self._waiting:
                written = os.write(self.fd, self._waiting[: 1 << 16])
                del self._waiting[:written]
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
            self._waiting.clear()
