"""`Node`: the front end's connection to one host, by a command that starts the agent, and its messages."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster import bootstrap, dial
from launcher.cluster.handshake import SignedSession
from launcher.cluster.hostfile import Host
from launcher.cluster.wire import Message, MessageReader, MessageWriter

ONE_LINE = 'import json; hello = json.loads(open(0, "rb", 0, closefd=False).readline()); exec(hello["code"])'
"""The program that Python runs on a node. It contains nothing that a shell could change: ', %, $, backslash,
newline."""
ERRORS_KEPT = 8
IDLE_TALK = ("srun: cluster configuration lacks support for cpu binding",)
"""Output of runners that never explains why an agent has ended."""
DRAIN_S = 0.5


@dataclass(frozen=True)
class ConnectionAttempt:
    """A node's attempt to reach another one."""

    target: str
    port: int
    reached: tuple[str, ...]
    """Addresses that answered."""
    why: str | None
    """Why another address could not be used."""


class Node:
    """A host and the connection to its agent.

    Args:
        host: name and slots.
        index: its number among all nodes.
        command: starts Python with ONE_LINE on the host, connected to pipes of this process; empty if the
            node connects on its own.
        dials: the command forwards no input; see `dial.py`.
        here: it is this machine, whose pipes always reveal that a process has died. Silence then only means
            that the process is busy or stopped.

    Attributes:
        facts: the facts reported by the agent; None until it has answered.
        heard: when the last message arrived (time.monotonic).
        lost: why the node is gone; None while it is not.
        running: it has ranks.
        left_out: no further attempt uses it, although it is reachable, because it was slow.
        pids: process ids of its ranks, on that host.
        complete: its ranks have ended, all of them successfully.
        tries: its attempts to reach other nodes before the ranks started (`rendezvous.py`).
        copy: the directory on the host with the shipped files (`sync.py`); None if nothing was shipped to
            this agent.
    """

    def __init__(
        self, host: Host, index: int, command: Sequence[str], *, dials: bool = False, here: bool = False
    ) -> None:
        self.host, self.index, self.command, self.dials, self.here = host, index, list(command), dials, here
        self.facts: Message | None = None
        self.lost: str | None = None
        self.running = self.complete = self.left_out = False
        self.pids: list[int] = []
        self.tries: list[ConnectionAttempt] = []
        self.copy: str | None = None
        self.heard = time.monotonic()
        self._errors = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._first: Message = {}

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def connected(self) -> bool:
        return self.lost is None and (self._process is not None or self._connection is not None)

    def connect(self, hello: Message) -> None:
        """Start the agent and send its first message."""
        self.heard, self.copy = time.monotonic(), None
        self._first = {**hello, "code": Path(bootstrap.__file__).read_text(encoding="utf-8")}
        if not self.command:
            return
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C must reach only the front end, which ends agents in order
            )
        except OSError as error:
            self.lost = f"{self.command[0]} cannot be started: {error.strerror}"
            return
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self.reader = MessageReader(self._process.stdout.fileno())
        self.writer = MessageWriter(self._process.stdin.fileno())
        os.set_blocking(self._process.stderr.fileno(), False)
        # The first line has no mark: ONE_LINE, which reads it, does not handle marks.
        if not self.dials:
            self.writer.send_plain(self._first)

    def send(self, do: str, **more: object) -> None:
        if self.connected:
            self.writer.send({"do": do, **more})

    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for input."""
        return [self.reader.fd] if self.connected and not self.reader.ended else []

    def read(self) -> list[Message]:
        """Return the messages that have arrived. If the connection has ended, set `lost` to the reason."""
        if not self.connected:
            return []
        messages = self.reader.read()
        self.writer.flush()
        self._read_errors()
        if self._connection is None:
            for told in [message for message in messages if message["is"] == "dial"]:
                self._dial(told)
        if messages:
            self.heard = time.monotonic()
        for told in [message for message in messages if message["is"] == "problem"]:
            self.give_up(f"{told['what']} ({told['fix']})")  # before `_why_ended`, which explains less
        if self.connected and self.reader.ended:
            self.lost = self._why_ended()
        return messages

    def give_up(self, why: str) -> None:
        """Stop waiting for the node."""
        self.lost = self.lost or why
        self.running = False
        self.close()

    def hang_up(self) -> None:
        """Close the connection, which the agent notices."""
        if self._connection is not None:
            with contextlib.suppress(
                OSError
            ):  # closing a socket with unread data would discard messages that were sent
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.settimeout(DRAIN_S)
                while self._connection.recv(1 << 16):
                    pass
        pipes = [self._process.stdin, self._process.stdout, self._process.stderr] if self._process else []
        for pipe in (*pipes, self._connection):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._connection = None

    def close(self, wait_s: float = 0.5) -> None:
        """Hang up, and make sure that the command that started the agent ends within `wait_s`."""
        self.hang_up()
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, wait_s))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def adopt(self, connection: socket.socket, session: SignedSession) -> None:
        """Use a connection to the agent as the control stream, and send the first message."""
        self._connection, self.heard, self.copy = connection, time.monotonic(), None
        self.reader = MessageReader(connection.fileno(), session.takes)
        self.writer = MessageWriter(connection.fileno(), session.sends)
        self.writer.send_plain(self._first)

    def complaint(self) -> str:
        """Return the last output of the command that started the agent."""
        said = self._errors.decode(errors="replace").splitlines()
        lines = [line for line in said if line.strip() and not any(text in line for text in IDLE_TALK)]
        noise = self.reader.noise if self._process is not None else []
        return "\n".join((lines or noise)[-ERRORS_KEPT:])

    def _dial(self, told: Message) -> None:
        try:
            connection, session = dial.dial(told, self.name)
        except OSError as error:
            self.give_up(f"its agent listens on port {told['port']} but cannot be reached: {error}")
            return
        self.adopt(connection, session)

    def _why_ended(self) -> str:
        if self.reader.forged:
            return "its connection carried a line that its agent did not sign: someone is tampering with it"
        if self._process is None:
            return "the connection ended"
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = None
        self._read_errors()
        said = self.complaint()
        how = "the connection ended" if code is None else f"{Path(self.command[0]).name} ended with {code}"
        return f"{how}: {said}" if said else how

    def _read_errors(self) -> None:
        if self._process is None or self._process.stderr is None:
            return
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self._errors = (self._errors + data)[-(1 << 14) :]
