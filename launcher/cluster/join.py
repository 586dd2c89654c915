"""Nodes that the user starts one by one (`--no_ssh`): each comes to the front end, instead of being called.

The front end of node 0 opens a door at the address that all know; every other node knocks. With LAUNCHER_TOKEN set on
all of them both sides prove that they know it (HMAC of the other's random number); the stream itself is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from launcher.cluster.node import Node
from launcher.errors import ConfigError

TOKEN = "LAUNCHER_TOKEN"
ANSWER_S = 5.0
DECISION_S = 60.0
"""How long a node that has proved itself waits to hear whether it is wanted."""
RETRY_S = 0.5
logger = logging.getLogger("launcher")


class Door:
    """Where nodes knock.

    Args:
        addr: of this machine, as the others know it.
        port: likewise.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, addr: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in addr else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used: {error.strerror}",
                where="--master_port",
                fix="name another one on all nodes",
            ) from None
        self._socket.listen(128)
        self._greeted: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        # Who only connects, or is slow, must not hold up the run.
        threading.Thread(target=self._open, daemon=True).start()

    def admit(self, nodes: Sequence[Node]) -> None:
        """Give every connection that has come to its node; one that is there already, or is not yet seen to be lost,
        is told to come again."""
        while not self._greeted.empty():
            rank, visitor = self._greeted.get()
            try:
                wanted = nodes[rank].lost is None and not nodes[rank].connected
                _send(visitor, {"wanted": wanted})
                if wanted:
                    nodes[rank].adopt(visitor)
                else:
                    visitor.close()
            except (OSError, IndexError):
                visitor.close()

    def _open(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:  # it has gone again, or there are too many
                time.sleep(RETRY_S)
                continue
            threading.Thread(target=self._welcome, args=(visitor,), daemon=True).start()

    def _welcome(self, visitor: socket.socket) -> None:
        visitor.settimeout(ANSWER_S)
        try:
            self._greeted.put((_greet(visitor), visitor))
        except (OSError, ValueError, KeyError, TypeError):
            visitor.close()


def _greet(visitor: socket.socket) -> int:
    """The node rank of who knocks.

    Raises:
        ValueError: it does not know the token.
    """
    question = secrets.token_hex(16)
    _send(visitor, {"question": question})
    answer = _receive(visitor)
    if not hmac.compare_digest(answer["proof"], _proof(question)):
        raise ValueError("another token")
    _send(visitor, {"proof": _proof(answer["question"])})
    rank = int(answer["node_rank"])
    if rank < 1:
        raise ValueError("no such node")
    return rank


def knock(addr: str, port: int, node_rank: int, patience_s: float) -> socket.socket:
    """A connection to the front end, which may start later than this node, or want it later.

    Args:
        patience_s: how long nobody may open.

    Raises:
        ConfigError: nobody opens, or somebody who does not know the token.
    """
    deadline, told = time.monotonic() + patience_s, False
    while True:
        try:
            connection = socket.create_connection((addr, port), timeout=ANSWER_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"node 0 does not answer at {addr}:{port}: {error.strerror or error}",
                    where="--master_addr, --master_port",
                    fix="start the same command with --node_rank 0 there",
                ) from None
            time.sleep(RETRY_S)
            continue
        if _is_wanted(connection, f"{addr}:{port}", node_rank):
            return connection
        connection.close()
        if not told:
            logger.warning("node 0 has a node %d already; waiting until it needs another", node_rank)
        deadline, told = time.monotonic() + patience_s, True
        time.sleep(RETRY_S)


def _is_wanted(connection: socket.socket, place: str, node_rank: int) -> bool:
    """Whether the front end takes this node now.

    Raises:
        ConfigError: it does not know the token, or of such a node.
    """
    try:
        asked = _receive(connection)["question"]
        question = secrets.token_hex(16)
        _send(connection, {"node_rank": node_rank, "proof": _proof(asked), "question": question})
        if not hmac.compare_digest(_receive(connection)["proof"], _proof(question)):
            raise ValueError
        connection.settimeout(DECISION_S)
        return bool(_receive(connection)["wanted"])
    except (OSError, ValueError, KeyError):
        raise ConfigError(
            f"{place} did not take this node",
            where="--master_addr, --master_port, LAUNCHER_TOKEN",
            fix=f"start the same command, with the same {TOKEN} or none, on every node",
        ) from None


def become_agent(connection: socket.socket) -> NoReturn:
    """Serve the front end that has opened."""
    connection.settimeout(None)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    with open(0, "rb", 0, closefd=False) as stream:
        hello = json.loads(stream.readline())
    exec(compile(hello["code"], "arrive.py", "exec"), {"hello": hello, "__name__": "arrive"})
    raise SystemExit(1)


def _proof(question: str) -> str:
    return hmac.new(os.environ.get(TOKEN, "").encode(), question.encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, message: dict[str, object]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, str]:
    """A line; not a byte more is taken."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > 4096:
            raise ValueError("no line")
        line += byte
    return dict(json.loads(line))
