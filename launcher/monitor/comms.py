"""The log of collectives (`comms_logger`): counts, message sizes, times and bandwidths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

MOST_SIZES = 8
"""Message sizes of one caller that have rows of their own. More belong to messages that vary, such as the tokens of
experts: they share one row."""

CollectiveKey = tuple[str, str, int]
"""(operation, caller, message bytes)."""


@dataclass
class CollectiveTotals:
    """Totals of collectives with the same key. Seconds are summed over `count` collectives.

    Attributes:
        moved: bytes that this rank sends with an optimal algorithm.
        seconds: from the start to the end of the wait, including overlapped compute.
        blocked: the part of `seconds` spent in the wait.
    """

    count: int = 0
    moved: int = 0
    seconds: float = 0.0
    blocked: float = 0.0


class CommsLog:
    """Adds up collectives.

    Args:
        operations: operations to log; None logs all.
        by_unit: separate rows per unit, not only per phase (`comms_logger.debug`).
        verbose: prints a line for each collective; None prints nothing.
    """

    def __init__(
        self,
        *,
        operations: frozenset[str] | None = None,
        by_unit: bool = False,
        verbose: Callable[[str], None] | None = None,
    ) -> None:
        self.operations, self.by_unit, self.verbose = operations, by_unit, verbose
        self.rows: dict[CollectiveKey, CollectiveTotals] = {}

    def logs(self, operation: str) -> bool:
        """Return whether this operation is logged."""
        return self.operations is None or operation in self.operations

    def add(self, operation: str, tag: str, nbytes: int, moved: int, seconds: float, blocked: float) -> None:
        """Add one finished collective; `tag` is unit/phase."""
        who = tag if self.by_unit else tag.rpartition("/")[2]
        row = self.rows.setdefault((operation, who, nbytes), CollectiveTotals())
        row.count += 1
        row.moved += moved
        row.seconds += seconds
        row.blocked += blocked
        if self.verbose is not None:
            one = CollectiveTotals(1, moved, seconds, blocked)
            algorithm, bus = bandwidths(nbytes, one)
            self.verbose(
                f"comm {operation} {who} | {_size(nbytes)} | {1000 * seconds:.2f} ms | algorithm {algorithm:.2f} "
                f"Gbps | bus {bus:.2f} Gbps"
            )

    def table(self, stragglers: Mapping[CollectiveKey, float] | None = None) -> str:
        """Return the log as text. A caller whose messages have many sizes has one row, with the range of sizes.

        Args:
            stragglers: minimum seconds over all ranks for each row; adds a column with this rank's excess,
                which is time spent waiting for slower ranks.
        """
        heads = [
            "operation",
            "caller",
            "message",
            "count",
            "total ms",
            "mean ms",
            "blocked ms",
            "alg Gbps",
            "bus Gbps",
        ]
        lines = [heads + (["straggler wait ms"] if stragglers is not None else [])]
        for keys in self._lines():
            operation, who, least = keys[0]
            row, size = self._sum(keys), _size(least)
            if len(keys) > 1:
                size += f" - {_size(keys[-1][2])}"
            mean = sum(key[2] * self.rows[key].count for key in keys) / row.count
            algorithm, bus = bandwidths(mean, row)
            cells = [operation, who, size, str(row.count), f"{1000 * row.seconds:.2f}"]
            cells += [f"{1000 * row.seconds / row.count:.3f}", f"{1000 * row.blocked:.2f}"]
            cells += [f"{algorithm:.2f}", f"{bus:.2f}"]
            if stragglers is not None:
                fastest = sum(stragglers.get(key, self.rows[key].seconds) for key in keys)
                cells.append(f"{1000 * (row.seconds - fastest):.2f}")
            lines.append(cells)
        return columns(lines, left=2)

    def _lines(self) -> Iterator[list[CollectiveKey]]:
        """Yield the keys of each line of the table, ordered by size."""
        for _, each in groupby(sorted(self.rows), key=lambda key: key[:2]):
            keys = list(each)
            yield from [keys] if len(keys) > MOST_SIZES else ([key] for key in keys)

    def _sum(self, keys: Sequence[CollectiveKey]) -> CollectiveTotals:
        total = CollectiveTotals()
        for row in (self.rows[key] for key in keys):
            total.count += row.count
            total.moved += row.moved
            total.seconds += row.seconds
            total.blocked += row.blocked
        return total


def bandwidths(nbytes: float, row: CollectiveTotals) -> tuple[float, float]:
    """Return the algorithm and bus bandwidth in Gbit/s, as defined by nccl-tests (doc/PERFORMANCE.md).

    These are message bytes over time, and bytes that a rank sends over time. The time includes overlapped
    compute, so both are lower bounds.
    """
    if row.seconds <= 0:
        return 0.0, 0.0
    return 8e-9 * nbytes * row.count / row.seconds, 8e-9 * row.moved / row.seconds


def columns(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Return the rows, starting with the heading, as text with the first `left` columns left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    for unit, limit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= limit:
            return f"{nbytes / limit:.2f} {unit}"
    return f"{nbytes} B"
