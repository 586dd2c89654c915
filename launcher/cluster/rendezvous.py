"""Where the ranks meet: an address of the first node that all others reach, and a port that is free there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.cluster.crew import Crew
from launcher.cluster.node import Node
from launcher.cluster.wire import Message
from launcher.errors import ConfigError

ANSWER_S = 8.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Wanted:
    """What the user asked for; None is to be found."""

    addr: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Met:
    """What the ranks get as MASTER_ADDR and MASTER_PORT."""

    addr: str
    port: int


def meet(crew: Crew, wanted: Wanted, look_up: Callable[[], None]) -> Met:
    """Choose; `look_up` is called while waiting.

    Raises:
        ConfigError: the wanted address or port cannot be used, or a node cannot reach the first one.
    """
    first, *others = crew.nodes
    addr = wanted.addr or ("" if others else LOOPBACK)
    first.send("listen", addr="" if others else addr, port=wanted.port or 0)
    answer = _answers(crew, [first], "listening", look_up)[first]
    if "problem" in answer:
        raise ConfigError(
            f"{addr or first.name}:{wanted.port or 'any port'} cannot be used: {answer['problem']}",
            where="--master_addr, --master_port",
            fix="leave both flags out: a free port is picked",
        )
    port = int(answer["port"])
    if not others:
        return Met(addr, port)
    assert first.facts is not None
    candidates = [wanted.addr] if wanted.addr else [*first.facts["addresses"], first.facts["host"]]
    crew.tell(others, "reach", addresses=candidates, port=port)
    reached = _answers(crew, others, "reached", look_up)
    for candidate in candidates:
        if all(candidate in answer["addresses"] for answer in reached.values()):
            return Met(candidate, port)
    cut_off = [node.name for node, answer in reached.items() if not answer["addresses"]]
    who, tried = ", ".join(cut_off) or "not all nodes", ", ".join(candidates)
    raise ConfigError(
        f"{who} cannot reach {first.name} on port {port}, tried: {tried}",
        where="the network between the nodes",
        fix="open the ports between them, or name an address that all reach: --master_addr",
    )


def _answers(crew: Crew, nodes: list[Node], kind: str, look_up: Callable[[], None]) -> dict[Node, Message]:
    found: dict[Node, Message] = {}
    while len(found) < len(nodes):
        for node, message in crew.events():
            if message["is"] == kind:
                found[node] = message
        look_up()
        lost = [node for node in nodes if node.lost is not None]
        if lost:
            raise ConfigError(f"{lost[0].name} was lost before any rank had started: {lost[0].lost}")
    return found
