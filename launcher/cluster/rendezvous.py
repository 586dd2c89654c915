"""Rendezvous of the ranks: an address of the first node that all other nodes reach, and a free port there.

In the same step nodes probe one another, in a ring and across it, so that a firewall is reported before any
rank waits behind it. The results are stored in `Node.tries`, for `preflight.py` to judge.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.cluster.node import ConnectionAttempt, Node
from launcher.cluster.node_group import NodeGroup
from launcher.cluster.wire import Message
from launcher.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RendezvousOptions:
    """The address and port that the user requested; None: chosen automatically."""

    addr: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class RendezvousAddress:
    """The values of MASTER_ADDR and MASTER_PORT for the ranks."""

    addr: str
    port: int


def meet(node_group: NodeGroup, wanted: RendezvousOptions, look_up: Callable[[], None]) -> RendezvousAddress:
    """Choose the rendezvous address, and let available nodes probe one another; waiting calls `look_up`.

    The result is valid if `preflight.judge` then finds all nodes ready.

    Raises:
        ConfigError: the requested address or port cannot be used.
    """
    first = node_group.nodes[0]
    there = [node for node in node_group.nodes if node.facts is not None and node.lost is None]
    alone = len(node_group.nodes) == 1
    addr = wanted.addr or (LOOPBACK if alone else "")
    words = {node: f"{secrets.token_hex(4)}-{node.index}" for node in there}
    for node in there:
        node.tries = []
        port = wanted.port or 0 if node is first else 0
        node.send("listen", addr=addr if alone else "", port=port, word=words[node])
    ports: dict[Node, int] = {}
    for node, answer in _answers(node_group, there, "listening", look_up).items():
        if "problem" in answer:
            raise ConfigError(
                f"{addr or node.name}:{wanted.port or 'any port'} cannot be used: {answer['problem']}",
                where="--master_addr, --master_port",
                fix="omit both flags: a free port is chosen",
            )
        ports[node] = int(answer["port"])
    if alone:
        return RendezvousAddress(addr, ports.get(first, 0))
    who_tries = {node: [p for p in partners(node, there, first) if p in ports] for node in ports}
    for node, targets in who_tries.items():
        tried = [
            {"addresses": _places(target, first, wanted), "port": ports[target], "word": words[target]}
            for target in targets
        ]
        node.send("reach", targets=tried)
    for node, answer in _answers(node_group, list(ports), "reached", look_up).items():
        node.tries = [
            ConnectionAttempt(target.name, ports[target], tuple(found["addresses"]), found["why"])
            for target, found in zip(who_tries[node], answer["found"], strict=True)
        ]
    return RendezvousAddress(_agreed(first, there, wanted), ports.get(first, 0))


def partners(node: Node, nodes: Sequence[Node], first: Node) -> list[Node]:
    """Return the nodes that a node probes: the first one, its successor in the ring, and the one across.

    Three probes per node find a firewalled machine just as all pairs would, without growing with the square
    of the number of nodes.
    """
    here, count = nodes.index(node), len(nodes)
    chosen = [first, nodes[(here + 1) % count], nodes[(here + max(2, count // 2)) % count]]
    return [other for other in dict.fromkeys(chosen) if other is not node and other in nodes]


def _places(target: Node, first: Node, wanted: RendezvousOptions) -> list[str]:
    if target is first and wanted.addr:
        return [wanted.addr]
    assert target.facts is not None
    return list(dict.fromkeys([*target.facts["addresses"], target.facts["host"]]))


def _agreed(first: Node, there: Sequence[Node], wanted: RendezvousOptions) -> str:
    """Return the address of the first node that all others reach, or else the one that most reach; the
    attempts of the remaining nodes are then marked as failed."""
    if first not in there:
        return wanted.addr or first.name
    tried = {node: t for node in there for t in node.tries if t.target == first.name}
    counts = Counter(address for t in tried.values() for address in t.reached)
    best = max(_places(first, first, wanted), key=lambda address: counts[address])  # the first one on a tie
    for node, one in tried.items():
        if one.reached and best not in one.reached:
            why = f"only at {', '.join(one.reached)}, but others at {best}: set --master_addr for all"
            node.tries = [replace(t, reached=(), why=why) if t is one else t for t in node.tries]
    return best


def _answers(
    node_group: NodeGroup, nodes: Sequence[Node], kind: str, look_up: Callable[[], None]
) -> Mapping[Node, Message]:
    """Return the answers of all nodes, except for nodes that are lost meanwhile."""
    found: dict[Node, Message] = {}
    while any(node not in found and node.lost is None for node in nodes):
        for node, message in node_group.events():
            if message["is"] == kind:
                found[node] = message
        look_up()
    return found
