"""The cores and threads of a rank: its own, inside one NUMA node where possible."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from launcher.cluster.hostfile import numbers
from launcher.errors import ConfigError, shortened

SYSTEM = Path("/sys/devices/system")
"""Where Linux tells of nodes and cores."""


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def parse_core_list(text: str) -> list[int]:
    """Parse `0-3,8` into [0, 1, 2, 3, 8].

    Raises:
        ConfigError: not a list of numbers and ranges, or a core that this process may not use.
    """
    cores = numbers(text.replace(" ", ""), "--bind_core_list", "core")
    usable = usable_cores()
    foreign = sorted(set(cores) - set(usable))
    if foreign:
        raise ConfigError(
            f"core {foreign[0]} of {shortened(text)!r} cannot be used",
            where="--bind_core_list",
            fix=f"choose among {shortened(','.join(map(str, usable)))}",
        )
    return list(cores)


def share_cores(cores: Sequence[int], ranks: int, system: Path = SYSTEM) -> list[list[int]]:
    """Return equal shares, one per rank; what does not divide is left over.

    No share lies in two NUMA nodes where that costs a rank at most a quarter of its cores: memory of another node is
    slower for every one of them. Hyperthreads of one core go to the same rank where they can.

    Raises:
        ConfigError: fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each == 0:
        raise ConfigError(
            f"{len(cores)} cores cannot be divided among {ranks} ranks",
            where="--bind_cores_to_rank",
            fix=f"start at most {len(cores)} ranks or leave the flag out",
        )
    nodes = _by_node(cores, system)
    for size in range(each, each - each // 4 - 1, -1):
        shares = [share for node in nodes for share in _cut(node, size)]
        if len(shares) >= ranks:
            return shares[:ranks]
    return _cut([core for node in nodes for core in node], each)[:ranks]


def _cut(cores: Sequence[int], size: int) -> list[list[int]]:
    """Return whole shares of `size` cores, each ascending."""
    return [sorted(cores[at : at + size]) for at in range(0, len(cores) - size + 1, size)]


def _by_node(cores: Sequence[int], system: Path) -> list[list[int]]:
    """Return the cores of each NUMA node, hyperthreads side by side; last those of which no node is known."""
    node_of: dict[int, int] = {}
    for file in system.glob("node/node[0-9]*/cpulist"):
        for core in _listed(file):  # none, where a node has memory only
            node_of[core] = int(file.parent.name.removeprefix("node"))
    places = {core: (node_of.get(core, math.inf), _first_thread(core, system), core) for core in cores}
    ordered = sorted(cores, key=places.__getitem__)
    return [list(group) for _, group in itertools.groupby(ordered, lambda core: places[core][0])]


def _first_thread(core: int, system: Path) -> int:
    """Return the lowest of the hyperthreads that share a core with this one."""
    siblings = _listed(system / f"cpu/cpu{core}/topology/thread_siblings_list")
    return min(siblings, default=core)


def _listed(file: Path) -> tuple[int, ...]:
    """Return the numbers in a file of Linux's, `0-3,8`; none where it is empty or not there."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return ()
    return numbers(text, str(file)) if text else ()


def threads(ranks: int, shares: Sequence[Sequence[int]] | None) -> int:
    """Return OMP_NUM_THREADS of a rank: the cores it is bound to, or its part of those of the machine."""
    return len(shares[0]) if shares else max(1, len(usable_cores()) // ranks)
