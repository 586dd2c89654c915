"""Parser of the hostfile, which lists the hosts and the slots of each.

A line is `NAME slots=COUNT` (slots 0 to COUNT - 1) or `NAME slots=0,2,5-7` (these slots); `#` starts a
comment. Nodes are numbered in the order of the lines. The grammar is DeepSpeed's, but mistakes that DeepSpeed
overlooks are errors here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ConfigError, printable, shortened
from launcher.files import read_small

_LINE = re.compile(
    r"(?P<name>\S+)\s+slots=(?P<slots>\S+)(?:\s+max[_-]slots=\d+)?"
)  # max_slots is Open MPI's, and ignored
MOST_SLOTS, MOST_NODES, MOST_RANKS = 4096, 1 << 14, 1 << 18
"""Limits of a machine, and of a run. Larger numbers are mistakes that would otherwise take hours and all
memory to detect."""
TOO_MANY = f"no machine has more than {MOST_SLOTS:,}"
LONGEST_NAME = 320  # a user name and a DNS host name
FORM = 'write "NAME slots=COUNT", or "NAME slots=0,2,5-7" for certain slots'


@dataclass(frozen=True)
class Host:
    """A host of a run: its name as passed to ssh (`user@name` and aliases work), and the slots used there."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts of a file, in its order.

    Raises:
        ConfigError: there is no such file, or a line is invalid; the error contains its number and text.
    """
    text = read_small(
        Path(path),
        "the hostfile",
        where="--hostfile",
        fix="pass a file with lines like `node1 slots=8`; without --hostfile only this machine is used",
    )
    return parse_hostfile(text, path)


def parse_hostfile(text: str, name: str) -> list[Host]:
    """Parse the text of a hostfile; `name` identifies it in errors."""
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    ranks = 0
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        where = f"{name}:{number}: {shortened(line.strip())}"
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"{shortened(entry)!r} does not specify a host and its slots", where=where, fix=FORM
            )
        host = match["name"]
        if host.startswith("-") or len(host) > LONGEST_NAME or printable(host) != host:
            raise ConfigError(f"{shortened(host)!r} is not a valid host name", where=where, fix=FORM)
        if host in lines:
            raise ConfigError(
                f"the host {shortened(host)} is listed twice",
                where=where,
                fix=f"delete this line or line {lines[host]}",
            )
        lines[host] = number
        hosts.append(Host(host, _slots(match["slots"], where)))
        ranks += len(hosts[-1].slots)
        check_size(len(hosts), ranks, where)
    if not hosts:
        raise ConfigError(f"the hostfile {name} contains no hosts", where="--hostfile", fix=FORM)
    return hosts


def _slots(text: str, where: str) -> tuple[int, ...]:
    if text.isdecimal() and text.isascii():
        if int(text) == 0:
            raise ConfigError(
                "slots=0: a host needs at least one slot",
                where=where,
                fix="delete the line or give it slots",
            )
        if len(text) > len(str(MOST_SLOTS)) or int(text) > MOST_SLOTS:
            raise ConfigError(f"slots={shortened(text)}: {TOO_MANY}", where=where, fix=FORM)
        return tuple(range(int(text)))
    if "," not in text and "-" not in text:
        raise ConfigError(f"slots={shortened(text)} is not a number", where=where, fix=FORM)
    return numbers(text, where)


def check_size(nodes: int, ranks: int, where: str) -> None:
    """Raise `ConfigError` if a run exceeds the size limits."""
    for count, most, noun in ((nodes, MOST_NODES, "hosts"), (ranks, MOST_RANKS, "ranks")):
        if count > most:
            raise ConfigError(
                f"{count:,} {noun}: a run has at most {most:,}", where=where, fix="start a smaller run"
            )


def numbers(text: str, where: str, noun: str = "slot") -> tuple[int, ...]:
    """Parse `0,2,5-7` into (0, 2, 5, 6, 7), ascending, each once.

    Raises:
        ConfigError: not a list of numbers and ranges.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(
                f"{shortened(part)!r} in {shortened(text)!r} is neither a {noun} nor a range of {noun}s",
                where=where,
                fix="write e.g. 0,2,5-7",
            )
        if int(match[2] or match[1]) >= MOST_SLOTS:
            raise ConfigError(
                f"{part} in {shortened(text)!r}: {TOO_MANY}", where=where, fix="write e.g. 0,2,5-7"
            )
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))
