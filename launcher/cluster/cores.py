"""Assignment of CPU cores and threads to ranks, within one NUMA node where possible."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

from launcher.cluster.hostfile import numbers
from launcher.errors import ConfigError, shortened

SYSTEM = Path("/sys/devices/system")
"""Where Linux describes NUMA nodes and cores."""


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
            f"core {foreign[0]} of {shortened(text)!r} is not available",
            where="--bind_core_list",
            fix=f"choose from {shortened(','.join(map(str, usable)))}",
        )
    return list(cores)


def share_cores(cores: Sequence[int], ranks: int, system: Path = SYSTEM) -> list[list[int]]:
    """Partition the cores equally among the ranks; a remainder stays unused.

    No share spans two NUMA nodes if avoiding that costs a rank at most a quarter of its cores: access to
    another node's memory is slower for every core. Hyperthreads of one core go to the same rank where
    possible.

    Raises:
        ConfigError: fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each == 0:
        raise ConfigError(
            f"{len(cores)} cores cannot be divided among {ranks} ranks",
            where="--bind_cores_to_rank",
            fix=f"start at most {len(cores)} ranks, or omit the flag",
        )
    nodes = _by_node(cores, system)
    for size in range(each, each - each // 4 - 1, -1):
        shares = [share for node in nodes for share in _cut(node, size)]
        if len(shares) >= ranks:
            return shares[:ranks]
    return _cut([core for node in nodes for core in node], each)[:ranks]


def _cut(cores: Sequence[int], size: int) -> list[list[int]]:
    """Split the cores into complete shares of `size`, each ascending."""
    return [sorted(cores[at : at + size]) for at in range(0, len(cores) - size + 1, size)]


def _by_node(cores: Sequence[int], system: Path) -> list[list[int]]:
    """Return the cores of each NUMA node, with hyperthreads adjacent; cores of unknown node come last."""
    node_of: dict[int, int] = {}
    for file in system.glob("node/node[0-9]*/cpulist"):
        for core in _listed(file):  # empty for a memory-only node
            node_of[core] = int(file.parent.name.removeprefix("node"))
    places = {core: (node_of.get(core, math.inf), _first_thread(core, system), core) for core in cores}
    ordered = sorted(cores, key=places.__getitem__)
    return [list(group) for _, group in itertools.groupby(ordered, lambda core: places[core][0])]


def _first_thread(core: int, system: Path) -> int:
    """Return the lowest-numbered hyperthread of the physical core that `core` belongs to."""
    siblings = _listed(system / f"cpu/cpu{core}/topology/thread_siblings_list")
    return min(siblings, default=core)


def _listed(file: Path) -> tuple[int, ...]:
    """Parse a Linux list of numbers, `0-3,8`; empty if the file is empty or missing."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return ()
    return numbers(text, str(file)) if text else ()


def threads(ranks: int, shares: Sequence[Sequence[int]] | None) -> int:
    """Return OMP_NUM_THREADS of a rank: the number of its cores, or its share of the usable cores if it is
    not bound."""
    return len(shares[0]) if shares else max(1, len(usable_cores()) // ranks)
