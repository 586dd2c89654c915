"""Nodes that the user starts one by one (`--no_ssh`), which then connect to the front end.

The front end of node 0 listens at the address that all nodes know; every other node connects to it. Both
sides prove that they know the run's token before they exchange anything else (`handshake.py`).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cluster import handshake
from launcher.cluster.handshake import SignedSession
from launcher.cluster.node import Node
from launcher.errors import ConfigError, shortened
from launcher.files import read_small

TOKEN = "LAUNCHER_TOKEN"
SHORTEST_TOKEN = 16
"""Characters. An eavesdropper on a handshake can try guesses offline for as long as it likes."""
ANSWER_S = 5.0
DECISION_S = 60.0
"""How long an authenticated node waits to learn whether it is needed."""
RETRY_S = 0.5
logger = logging.getLogger("launcher")


def token_of(environment: Mapping[str, str], file: str | None, *, insecure: bool, makes: bool) -> str:
    """Return the token that all nodes of a run share.

    Args:
        environment: may contain it as LAUNCHER_TOKEN.
        file: may contain it as its first line; takes precedence.
        insecure: there is no token, and everyone who reaches the port is trusted.
        makes: if no token is given, create one and print it.

    Raises:
        ConfigError: there is no token, or it is easily guessed.
    """
    if insecure:
        if file is not None:
            raise ConfigError("--insecure and --token_file are mutually exclusive")
        logger.warning("--insecure: anyone who can reach the port of node 0 can run code on every node")
        return ""
    token, where = environment.get(TOKEN, ""), TOKEN
    if file is not None:
        token, where = _first_line(file), f"--token_file {file}"
    elif not token and makes:
        return _printed(secrets.token_hex(16))
    if not token:
        raise ConfigError(
            "--no_ssh requires the run's token, but no token was given",
            where=where,
            fix=f"set {TOKEN} to the token that node 0 prints when it starts, or pass a file with a token on "
            "all nodes: --token_file PATH",
        )
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"the token is too easy to guess or mistype: at least {SHORTEST_TOKEN} ASCII characters are required",
            where=where,
            fix="generate one with: openssl rand -hex 16",
        )
    return token


def _first_line(file: str) -> str:
    fix = "pass a file with one line"
    lines = read_small(Path(file), "the token file", where="--token_file", fix=fix).splitlines()
    if os.stat(file).st_mode & stat.S_IROTH:
        raise ConfigError(
            f"every user of this machine can read {file}",
            where="--token_file",
            fix=f"write a new token to it, and run chmod 600 {file}",
        )
    return lines[0].strip() if lines else ""


def _printed(token: str) -> str:
    """Print a new token to the user, and to nobody else."""
    facts = os.fstat(sys.stderr.fileno())
    if stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o077:
        raise ConfigError(
            "no token was given, and a generated one would be written to a file that other users can read",
            where="stderr",
            fix=f"set {TOKEN} on all nodes, or pass --token_file PATH",
        )
    print(
        f"launch: the other nodes need the token of this run: export {TOKEN}={token}",
        file=sys.stderr,
        flush=True,
    )
    return token


class JoinServer:
    """The server to which nodes connect.

    Args:
        addr: address of this machine, as the other nodes know it.
        port: likewise.
        token: the token that nodes must know.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, addr: str, port: int, token: str) -> None:
        family = socket.AF_INET6 if ":" in addr else socket.AF_INET
        self._socket, self._token = socket.socket(family, socket.SOCK_STREAM), token
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used: {error.strerror}",
                where="--master_port",
                fix="use another port on all nodes",
            ) from None
        self._socket.listen(128)
        self._greeted: queue.SimpleQueue[tuple[socket.socket, SignedSession]] = queue.SimpleQueue()
        # In a thread: a peer that only connects, or is slow, must not hold up the run.
        threading.Thread(target=self._open, daemon=True).start()

    def admit(self, nodes: Sequence[Node]) -> None:
        """Hand every new connection to its node.

        A node that is already connected, or not yet known to be lost, is told to try again.
        """
        while not self._greeted.empty():
            visitor, session = self._greeted.get()
            try:
                rank = int(session.claim)
                known = 1 <= rank < len(nodes)
                wanted = known and nodes[rank].lost is None and not nodes[rank].connected
                visitor.settimeout(ANSWER_S)
                visitor.sendall(
                    session.sends.closed(json.dumps({"known": known, "wanted": wanted}).encode()) + b"\n"
                )
                if wanted:
                    nodes[rank].adopt(visitor, session)
                else:
                    visitor.close()
            except (OSError, ValueError):
                visitor.close()

    def _open(self) -> None:
        for found in handshake.callers(self._socket, self._token):
            self._greeted.put(found)


def connect(
    addr: str, port: int, node_rank: int, token: str, patience_s: float
) -> tuple[socket.socket, SignedSession]:
    """Connect to the front end, which may start later than this node, or need it only later.

    Args:
        patience_s: how long to keep trying while nothing answers.

    Raises:
        ConfigError: nothing answers, or something that does not know the token.
    """
    deadline, told = time.monotonic() + patience_s, False
    while True:
        try:
            connection = socket.create_connection((addr, port), timeout=ANSWER_S)
        except UnicodeError:
            raise ConfigError(
                f"{shortened(addr)!r} is not a host name",
                where="--master_addr",
                fix="pass the host name of node 0",
            ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"node 0 does not answer at {addr}:{port}: {error.strerror or error}",
                    where="--master_addr, --master_port",
                    fix="start the same command with --node_rank 0 there",
                ) from None
            time.sleep(RETRY_S)
            continue
        if session := _wanted(connection, f"{addr}:{port}", node_rank, token):
            return connection, session
        connection.close()
        if not told:
            logger.warning(
                "node rank %d is already connected; waiting until node 0 needs a replacement", node_rank
            )
        deadline, told = time.monotonic() + patience_s, True
        time.sleep(RETRY_S)


def _wanted(connection: socket.socket, place: str, node_rank: int, token: str) -> SignedSession | None:
    """Return the session with the front end if it accepts this node now, else None.

    Raises:
        ConfigError: the front end does not know the token, or the run has no such node.
    """
    try:
        session = handshake.call(connection, token, str(node_rank), ANSWER_S)
        line = handshake.read_line(connection, time.monotonic() + DECISION_S)
        said = json.loads(session.takes.opened(line.encode()))
    except (OSError, ValueError):
        raise ConfigError(
            f"{place} rejected this node: its token is different",
            where=f"--master_addr, --master_port, {TOKEN}",
            fix=f"start the same command on every node, with the same {TOKEN} (or --insecure)",
        ) from None
    if not said["known"]:
        raise ConfigError(
            f"{place} rejected this node: the run has no node {node_rank}",
            where="--node_rank, --num_nodes",
            fix="start the same command on every node, with node ranks from 0",
        )
    return session if said["wanted"] else None
