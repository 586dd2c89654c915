"""`Crew`: all nodes of a run, connected in parallel and listened to in one loop."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from launcher.cluster.node import Node
from launcher.cluster.wire import Message

POLL_MS = 50
CLOSE_S = 1.0


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds."""

    connect_s: float = 9.0
    """From the start of a connection until the agent answers."""
    silence_s: float = 12.0
    """Without a word from a node it is taken for lost; without a word from the front end an agent ends its ranks."""
    grace_s: float = 3.0
    """Between SIGTERM and SIGKILL for ranks."""
    fan_out: int = 64
    """Connections that are set up at the same time."""

    @property
    def beat_s(self) -> float:
        """How often each side says that it is alive."""
        return self.silence_s / 6


class Crew:
    """The nodes, and what they say.

    Args:
        nodes: in the order of their ranks.
        limits: see `Limits`.
        admit: called in every turn while nodes are waited for; it may let some in (`join.py`).

    Attributes:
        ending: ranks are being ended, which keeps agents busy for longer than they may be silent otherwise.
    """

    def __init__(
        self, nodes: Sequence[Node], limits: Limits, admit: Callable[[Sequence[Node]], None] | None = None
    ) -> None:
        self.nodes, self.limits, self.admit = list(nodes), limits, admit
        self.ending = False
        self._told_lost: set[Node] = set()
        self._beaten = time.monotonic()

    def connect(self, nodes: Iterable[Node], hello: Callable[[Node], Message]) -> Iterator[None]:
        """Connect to `nodes`. Yields in between, for who wants to look at something else; ends when each has arrived
        (`facts`) or is `lost`."""
        waiting, arriving = list(nodes), set[Node]()
        while waiting or arriving:
            while waiting and len(arriving) < self.limits.fan_out:
                node = waiting.pop(0)
                node.connect(hello(node))
                arriving.add(node)
            if self.admit is not None:
                self.admit(self.nodes)
            for node, message in self.events():
                if message["is"] == "here":
                    node.facts = {**message["facts"], "arrived": time.time()}
                elif message["is"] == "problem":
                    node.give_up(message["what"] + f" ({message['fix']})")
            now = time.monotonic()
            for node in list(arriving):
                if node.facts is None and node.lost is None and now - node.heard > self.limits.connect_s:
                    said = node.complaint()
                    node.give_up(
                        f"no answer within {self.limits.connect_s:g} s" + (f": {said}" if said else "")
                    )
                if node.facts is not None or node.lost is not None:
                    arriving.discard(node)
            yield

    def events(self) -> Iterator[tuple[Node, Message]]:
        """What the nodes say within one turn; `{"is": "lost"}`, once, for a node that has gone (see `Node.lost`)."""
        poll = select.poll()
        by_fd = {fd: node for node in self.nodes for fd in node.descriptors()}
        for fd, node in by_fd.items():
            poll.register(fd, select.POLLIN)
            if node.writer.waiting:
                poll.register(node.writer.fd, select.POLLOUT)
        readable = poll.poll(POLL_MS)
        now = time.monotonic()
        for fd, _ in readable:
            if fd in by_fd:
                for message in by_fd[fd].read():
                    yield by_fd[fd], message
            else:
                next(node for node in by_fd.values() if node.writer.fd == fd).writer.flush()
        if now - self._beaten >= self.limits.beat_s:
            self._beaten = now
            for node in self.nodes:
                node.send("beat")
        yield from self._losses(now)

    def tell(self, nodes: Iterable[Node], do: str, **more: object) -> None:
        for node in nodes:
            node.send(do, **more)

    def forget(self, node: Node) -> None:
        """A lost node may be connected to again."""
        node.close()
        node.lost = node.facts = None
        self._told_lost.discard(node)

    def close(self) -> None:
        """Let the agents go."""
        self.tell(self.nodes, "bye")
        for node in self.nodes:
            node.hang_up()
        until = time.monotonic() + CLOSE_S
        for node in self.nodes:
            node.close(until - time.monotonic())

    def _losses(self, now: float) -> Iterator[tuple[Node, Message]]:
        for node in self.nodes:
            heeded = node.connected and node.facts is not None and not (node.here or self.ending)
            if heeded and now - node.heard > self.limits.silence_s:
                node.give_up(
                    f"nothing was heard of it for {self.limits.silence_s:g} s: it is cut off, frozen or down"
                )
            if node.lost is not None and node not in self._told_lost:
                self._told_lost.add(node)
                yield node, {"is": "lost"}
