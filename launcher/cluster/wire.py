"""Protocol between front end and agents: one JSON object per line, over the pipes of the agent's command.

Each line begins with a mark, which distinguishes it from the output of a login shell. Bytes printed by a rank
travel as text with surrogate escapes and arrive unchanged. On a TCP connection each line is signed
(`handshake.py`).
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
"""Most bytes of a line; no message comes close."""
Message = dict[str, Any]


def encoded(message: Message, seal: MessageSigner | None = None, mark: bytes = MARK) -> bytes:
    """Return a message as a line, with its mark and newline."""
    text = json.dumps(message).encode()
    return mark + (text if seal is None else seal.closed(text)) + b"\n"


def text_of(data: bytes) -> str:
    return data.decode("utf-8", errors="surrogateescape")


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


class MessageReader:
    """Reads messages from a non-blocking file descriptor.

    Attributes:
        noise: the last lines that were not messages: a shell's greeting, or its error.
        ended: the writer is gone, or has sent a line that failed verification: `forged`.
    """

    def __init__(self, fd: int, seal: MessageSigner | None = None) -> None:
        self.fd, self._seal = fd, seal
        self.forged = False
        self.noise: list[str] = []
        self.ended = False
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> list[Message]:
        """Return the messages that have arrived, up to a limit that lets the caller do other work in
        between."""
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
    """Writes messages to a file descriptor; what it does not accept at once is buffered.

    A peer that does not read must not block the sender: neither a cut-off node the front end, nor a cut-off
    front end an agent.
    """

    def __init__(self, fd: int, seal: MessageSigner | None = None) -> None:
        self.fd, self._seal = fd, seal
        self.broken = False
        self._waiting = bytearray()
        os.set_blocking(fd, False)

    @property
    def full(self) -> bool:
        """Return whether so much is buffered that further output of ranks should be held back."""
        return len(self._waiting) > ENOUGH

    @property
    def waiting(self) -> bool:
        return bool(self._waiting) and not self.broken

    def send(self, message: Message) -> None:
        if not self.broken:
            self._waiting += encoded(message, self._seal)
            self.flush()

    def send_plain(self, message: Message) -> None:
        """Send a line without a mark, to a reader that does not handle marks yet."""
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
