"""Selection of hosts and slots: `--include`, `--exclude`, `--num_nodes`, `--num_gpus`, and device masks.

A filter is `NODE(@NODE)*`, where a node is `NAME` or `NAME:SLOTS`, and slots are `0,2,5-7`. The result keeps
the order of the hosts.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace

from launcher.cluster.hostfile import Host, numbers
from launcher.errors import ConfigError, first_names, shortened


def select(
    hosts: Sequence[Host],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> list[Host]:
    """Return the hosts and slots that a run uses, in the order of `hosts`.

    Raises:
        ConfigError: the flags contradict each other, name unknown hosts or slots, or leave nothing.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude are mutually exclusive", fix="keep one")
    for flag, value in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if value is not None and (include or exclude):
            other = "--include" if include else "--exclude"
            raise ConfigError(f"{flag} and {other} are mutually exclusive", fix="keep one")
    chosen = list(hosts)
    if include:
        wanted = _parse(include, "--include", hosts)
        chosen = [replace(host, slots=wanted[host.name]) for host in hosts if host.name in wanted]
    if exclude:
        unwanted = _parse(exclude, "--exclude", hosts)
        left = {host.name: set(host.slots) - set(unwanted.get(host.name, ())) for host in hosts}
        chosen = [replace(host, slots=tuple(sorted(left[host.name]))) for host in hosts if left[host.name]]
        if not chosen:
            raise ConfigError(
                f"--exclude {shortened(exclude)} excludes every slot of all {len(hosts)} hosts",
                fix="exclude fewer slots",
            )
    if num_nodes is not None:
        if num_nodes > len(chosen):
            raise ConfigError(
                f"--num_nodes {num_nodes}: the number of hosts is {len(chosen)}",
                fix="request fewer, or list more in --hostfile",
            )
        chosen = chosen[:num_nodes]
    return chosen if num_gpus is None else [first_slots(host, num_gpus) for host in chosen]


def first_slots(host: Host, count: int) -> Host:
    """Return the host with its first `count` slots.

    Raises:
        ConfigError: the host has fewer slots.
    """
    if count > len(host.slots):
        raise ConfigError(
            f"--num_gpus {count}: {host.name} has {len(host.slots)} slots",
            fix=f"use --num_gpus {len(host.slots)}, or give the host more slots in the hostfile",
        )
    return replace(host, slots=host.slots[:count])


def first_ranks(hosts: Sequence[Host], count: int) -> list[Host]:
    """Return the first `count` slots of all hosts, in their order; hosts without any of them are dropped."""
    chosen: list[Host] = []
    for host in hosts:
        slots = host.slots[:count]
        count -= len(slots)
        if slots:
            chosen.append(replace(host, slots=slots))
    return chosen


def _parse(text: str, flag: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Parse a filter into {host: slots}."""
    there = {host.name: host.slots for host in hosts}
    found: dict[str, set[int]] = {}
    for node in _nodes(text, there):
        where = f"{flag} {shortened(text)}"
        name, colon, slots = (node, "", "") if node in there else node.rpartition(":")
        if name not in there:
            name = name or node
            near = difflib.get_close_matches(name, there, n=1)
            raise ConfigError(
                f"{shortened(name)!r} is not a host of this run",
                where=where,
                fix=f"did you mean {near[0]!r}?" if near else f"hosts: {first_names(there, 8)}",
            )
        chosen = numbers(slots, where) if colon else there[name]
        missing = sorted(set(chosen) - set(there[name]))
        if missing:
            has = shortened(",".join(map(str, there[name])))
            raise ConfigError(f"{name} has no slot {missing[0]}", where=where, fix=f"its slots are {has}")
        found.setdefault(name, set()).update(chosen)
    return {name: tuple(sorted(slots)) for name, slots in found.items()}


def _nodes(text: str, there: dict[str, tuple[int, ...]]) -> list[str]:
    """Split a filter into nodes at `@`, which may also be part of a host's name (`user@host`)."""
    nodes: list[str] = []
    parts = text.split("@")
    at = 0
    while at < len(parts):
        joined = "@".join(parts[at : at + 2])
        name = "@".join([parts[at], *(part.partition(":")[0] for part in parts[at + 1 : at + 2])])
        both = at + 1 < len(parts) and {joined, name} & there.keys()
        nodes.append(joined if both else parts[at])
        at += 2 if both else 1
    return nodes


def masked_devices(mask: str | None, slots: Sequence[int], where: str) -> str | None:
    """Return the device mask for the ranks of a node; None leaves the environment unchanged.

    Args:
        mask: the mask that a user or a scheduler has set on the node: ids or UUIDs; None if there is none.
            Slot n then refers to its n-th entry.
        slots: the chosen slots, numbered as in the hostfile.
        where: the host, for errors.

    Raises:
        ConfigError: the mask shows fewer devices than the slots need.
    """
    if mask is None:
        return ",".join(map(str, slots))
    shown = [entry.strip() for entry in mask.split(",") if entry.strip()]
    if slots and max(slots) >= len(shown):
        raise ConfigError(
            f"slot {max(slots)} was requested, but the device mask shows {len(shown)}: {shortened(mask)!r}",
            where=where,
            fix="use fewer slots there, or change the mask",
        )
    return ",".join(shown[slot] for slot in slots)
