"""`NodeGroup`: all nodes of a run, connected in parallel and polled in one loop."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from launcher.cluster.node import Node
from launcher.cluster.wire import Message

POLL_MS = 50
CLOSE_S = 1.0
logger = logging.getLogger("launcher")


@dataclass(frozen=True)
class NodeTimeouts:
    """Time limits for nodes, in seconds."""

    connect_s: float = 9.0
    """From the start of a connection until the agent answers."""
    silence_s: float = 12.0
    """A node that is silent for this long counts as lost; an agent whose front end is silent for this long
    ends its ranks."""
    grace_s: float = 3.0
    """Between SIGTERM and SIGKILL to ranks."""
    return_s: float = 9.0
    """How long a restart waits for missing nodes that it can do without."""
    fan_out: int = 64
    """Connections that are set up concurrently."""

    @property
    def beat_s(self) -> float:
        """Return the heartbeat interval of both sides."""
        return self.silence_s / 6


class NodeGroup:
    """The nodes of a run, and their messages.

    Args:
        nodes: in the order of their ranks.
        timeouts: see `NodeTimeouts`.
        admit: called with all nodes in every iteration; it may connect some of them (`join.py`).

    Attributes:
        everyone: all nodes, including lost nodes and those in reserve.
        nodes: the nodes of the current attempt.
        ending: ranks are being ended, which may keep agents silent for longer than is allowed otherwise.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        timeouts: NodeTimeouts,
        admit: Callable[[Sequence[Node]], None] | None = None,
    ) -> None:
        self.everyone, self.nodes = tuple(nodes), list(nodes)
        self.timeouts, self.admit = timeouts, admit
        self.ending = False
        self._arriving: set[Node] = set()
        self._told_lost: set[Node] = set()
        self._beaten = time.monotonic()

    def connect(self, nodes: Iterable[Node], hello: Callable[[Node], Message]) -> Iterator[None]:
        """Connect to `nodes`, until each has answered (`facts`) or is `lost`.

        Yields between polls, so that the caller can do other work or stop waiting.
        """
        waiting, arriving = list(nodes), self._arriving
        try:
            while waiting or arriving:
                while waiting and len(arriving) < self.timeouts.fan_out:
                    node = waiting.pop(0)
                    node.connect(hello(node))
                    arriving.add(node)
                for _ in self.events():
                    pass
                now = time.monotonic()
                for node in list(arriving):
                    if (
                        node.facts is None
                        and node.lost is None
                        and now - node.heard > self.timeouts.connect_s
                    ):
                        said = node.complaint()
                        node.give_up(
                            f"no answer within {self.timeouts.connect_s:g} s" + (f": {said}" if said else "")
                        )
                    if node.facts is not None or node.lost is not None:
                        arriving.discard(node)
                yield
        finally:
            arriving.clear()

    def events(self) -> Iterator[tuple[Node, Message]]:
        """Poll once, and yield the messages of the attempt's nodes.

        A node that is gone yields `{"is": "lost"}` once (see `Node.lost`). Other nodes that connect meanwhile
        are held in reserve.
        """
        if self.admit is not None:
            self.admit(self.everyone)
        poll = select.poll()
        by_fd = {fd: node for node in self.everyone for fd in node.descriptors()}
        for fd, node in by_fd.items():
            poll.register(fd, select.POLLIN)
            if node.writer.waiting:
                poll.register(node.writer.fd, select.POLLOUT)
        readable = poll.poll(POLL_MS)
        now = time.monotonic()
        for fd, _ in readable:
            if fd in by_fd:
                for message in by_fd[fd].read():
                    if self._arrives(by_fd[fd], message):
                        continue
                    if by_fd[fd] in self.nodes:
                        yield by_fd[fd], message
            else:
                next(node for node in by_fd.values() if node.writer.fd == fd).writer.flush()
        if now - self._beaten >= self.timeouts.beat_s:
            self._beaten = now
            for node in self.everyone:
                node.send("beat")
        yield from self._losses(now)

    def tell(self, nodes: Iterable[Node], do: str, **more: object) -> None:
        for node in nodes:
            node.send(do, **more)

    def forget(self, node: Node) -> None:
        """Reset a lost node, so that it can be connected again."""
        node.close()
        node.lost = node.facts = None
        self._told_lost.discard(node)

    def close(self) -> None:
        """Dismiss all agents and close their connections."""
        self.tell(self.everyone, "bye")
        for node in self.everyone:
            node.hang_up()
        until = time.monotonic() + CLOSE_S
        for node in self.everyone:
            node.close(until - time.monotonic())

    def _losses(self, now: float) -> Iterator[tuple[Node, Message]]:
        for node in self.everyone:
            heeded = node.connected and node.facts is not None and not (node.here or self.ending)
            if heeded and now - node.heard > self.timeouts.silence_s:
                node.give_up(
                    f"no heartbeat for {self.timeouts.silence_s:g} s: the node is disconnected, frozen or down"
                )
            if node.lost is None:
                continue
            if node not in self.nodes and node not in self._arriving:
                self.forget(node)  # it may reconnect at any time
            elif node not in self._told_lost:
                self._told_lost.add(node)
                yield node, {"is": "lost"}

    def _arrives(self, node: Node, message: Message) -> bool:
        """Return whether the message is about the arrival of a node; if so, record it."""
        if message["is"] == "here":
            node.facts = {**message["facts"], "arrived": time.time()}
            if node not in self.nodes and node not in self._arriving:
                logger.info("%s is available; the next restart can use it", node.name)
        return message["is"] in ("here", "problem")
