"""Which cores and how many threads a rank gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from launcher.errors import ConfigError


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def parse_core_list(text: str) -> list[int]:
    """`0-3,8` -> [0, 1, 2, 3, 8].

    Raises:
        ConfigError: not a list of numbers and ranges, or a core that this process may not use.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(
                f"{text!r} is no list of cores", where="--bind_core_list", fix="write e.g. 0-3,8"
            )
        cores += range(int(first), int(last or first) + 1)
    foreign = sorted(set(cores) - set(usable_cores()))
    if foreign or not cores:
        raise ConfigError(
            f"cores {foreign} of {text!r} cannot be used",
            where="--bind_core_list",
            fix=f"choose among {usable_cores()}",
        )
    return sorted(set(cores))


def share_cores(cores: Sequence[int], ranks: int) -> list[list[int]]:
    """Contiguous, equal shares, one per rank; what does not divide is left over.

    Raises:
        ConfigError: fewer cores than ranks.
    """
    each = len(cores) // ranks
    if each == 0:
        raise ConfigError(
            f"{len(cores)} cores cannot be shared out to {ranks} ranks",
            where="--bind_cores_to_rank",
            fix=f"start at most {len(cores)} ranks or leave the flag out",
        )
    return [list(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def threads(ranks: int, shares: Sequence[Sequence[int]] | None) -> int:
    """OMP_NUM_THREADS of a rank: the cores it is bound to, or its part of those of the machine."""
    return len(shares[0]) if shares else max(1, len(usable_cores()) // ranks)
