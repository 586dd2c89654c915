"""Readiness check of all nodes, from the facts that their agents report: one table of all problems."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.cluster.facts import PACKAGES
from launcher.cluster.node import ConnectionAttempt, Node
from launcher.errors import ConfigError

CLOCK_S = 30.0
LEAST_MEMORY = 256 << 20  # bytes per rank: torch cannot even be imported with less


@dataclass(frozen=True)
class NodeRequirements:
    """The requirements of a run on its nodes."""

    files: Mapping[str, str | None]
    """Digests of the files that the ranks read, on this machine."""
    device: str
    """`auto`, `cuda` or `cpu`."""
    compare: bool = True
    """Require the same versions on all nodes; not needed for a single node."""


def judge(nodes: Sequence[Node], needs: NodeRequirements) -> None:
    """Raise an error if nodes are not ready.

    Raises:
        ConfigError: some node is not ready; nothing has been started.
    """
    walls = _walls(nodes)
    rows = [
        (node.name, said)
        for node in nodes
        for said in (*_wrong(node, nodes, needs), *walls.get(node.name, ()))
    ]
    if len(nodes) == 1 and nodes[0].facts is None:
        raise ConfigError(f"{nodes[0].name} is not ready: {nodes[0].lost}", where=nodes[0].name)
    refuse(rows, len(nodes))


def refuse(rows: Sequence[tuple[str, str]], hosts: int) -> None:
    """Report problems as (host, problem) rows, if there are any; `hosts` is the number of all hosts.

    Raises:
        ConfigError: with the table.
    """
    if not rows:
        return
    width = max(len(name) for name, _ in rows)
    table = "".join(f"\n  {name:<{width}}  {_indented(said, width)}" for name, said in rows)
    bad = len({name for name, _ in rows})
    verb = "is" if bad == 1 else "are"
    raise ConfigError(f"{bad} of {hosts} hosts {verb} not ready, and nothing was started:{table}")


def _wrong(node: Node, nodes: Sequence[Node], needs: NodeRequirements) -> Iterator[str]:
    """Yield the problems of one node."""
    facts = node.facts
    if node.lost is not None or facts is None:
        yield _why_unreachable(node)
        return
    for path, digest in facts["files"].items():
        if digest is None:
            yield f"{path} does not exist (copy it there, or use a shared directory)"
        elif needs.files.get(path) not in (None, digest):
            yield f"{path} differs from the file on this machine"
    if needs.compare:
        for package in PACKAGES:
            usual = _most([other.facts["versions"][package] for other in nodes if other.facts])
            version = facts["versions"][package]
            if version != usual:
                yield f"{package} is {version or 'not installed'}, but {usual or 'not installed'} on the other hosts"
        if facts["source"] != _most([other.facts["source"] for other in nodes if other.facts]):
            yield "its launcher version differs from that of the other hosts"
        skew = facts["clock"] - facts["arrived"]
        if abs(skew) > CLOCK_S:
            yield f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'} (run an NTP service)"
    if facts["memory"] < LEAST_MEMORY * max(1, len(node.host.slots)):
        yield f"{facts['memory'] >> 20} MiB of memory are free, too little for {len(node.host.slots)} ranks"
    if needs.device == "cuda" and facts["gpus"] == 0:
        yield "no CUDA device is visible (--device cpu runs on the CPU)"
    elif needs.device != "cpu" and 0 < facts["gpus"] <= max(node.host.slots, default=0):
        mask = f", CUDA_VISIBLE_DEVICES={facts['mask']}" if facts["mask"] is not None else ""
        yield f"{facts['gpus']} CUDA devices are visible, but slot {max(node.host.slots)} was requested{mask}"


WALL = "is there a firewall? ranks connect to each other on arbitrary ports"


def _walls(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return which hosts cannot reach which others, reported for the host at fault if that can be determined.

    A host that several others cannot reach, although they reach one another, is behind a firewall itself.
    """
    walls: dict[str, list[str]] = defaultdict(list)
    failed = [(node.name, one) for node in nodes for one in node.tries if not one.reached]
    able = {node.name for node in nodes if any(one.reached for one in node.tries)}
    tried_by: dict[str, list[tuple[str, ConnectionAttempt]]] = defaultdict(list)
    for node in nodes:
        for one in node.tries:
            if node.name in able:
                tried_by[one.target].append((node.name, one))
    shut = {
        target
        for target, tries in tried_by.items()
        if len(tries) > 1 and not any(one.reached for _, one in tries)
    }
    for target in shut:
        names, one = few([name for name, _ in tried_by[target]]), tried_by[target][0][1]
        walls[target].append(f"{names} cannot reach {target}:{one.port}: {one.why} ({WALL})")
    for name, one in failed:
        if one.target not in shut or name not in able:
            walls[name].append(f"cannot reach {one.target}:{one.port}: {one.why} ({WALL})")
    return walls


def few(names: Sequence[str]) -> str:
    """Return all names, or only the first ones and the last one if there are many."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])}, ..., {names[-1]}"


HINTS = {
    "Name or service not known": "unknown host name: check the hostfile and ~/.ssh/config",
    "Could not resolve hostname": "unknown host name: check the hostfile and ~/.ssh/config",
    "Permission denied (": "ssh requires a password there: add your key to its ~/.ssh/authorized_keys",
    "Host key verification failed": "connect once manually and accept the host key",
    "Connection refused": "nothing listens there: is sshd running, and is --ssh_port right?",
    "Connection timed out": "no answer: is the machine up, and does the network reach it?",
    "No route to host": "no route: is the machine up and connected?",
    "cannot execute": f"is {sys.executable} installed there? --venv_script can set up the shell",
    "not found": f"is {sys.executable} installed there? --venv_script can set up the shell",
    "No such file": f"is {sys.executable} installed there? --venv_script can set up the shell",
}


def _why_unreachable(node: Node) -> str:
    said = node.lost or "it did not answer"
    hint = next((hint for sign, hint in HINTS.items() if sign in said), None)
    return f"{said} ({hint})" if hint else said


def _most(values: Sequence[str | None]) -> str | None:
    """Return the most common value; among equally common values, the first."""
    return Counter(values).most_common(1)[0][0]


def _indented(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * (width + 4))
