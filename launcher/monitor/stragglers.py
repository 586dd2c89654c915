"""Detection of stragglers: ranks that compute more slowly than others with the same work.

Time spent waiting for other ranks is excluded, because a slow rank makes the others wait. Each rank is
compared with the median of the others by a robust score (median absolute deviation; Iglewicz & Hoaglin 1993).
Uses only the standard library, since it runs in the front end, which does not import torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.monitor.flight_recorder import COUNTED, StepCounters

WINDOW = 5
"""Optimizer steps per window, over which times are averaged."""
WINDOWS = 2
"""Consecutive slow windows after which a rank is reported: at most 15 steps, if steps take longer than the
interval between two calls of `look`."""
RATIO = 1.2
"""Minimum time relative to the median of the others."""
SCORE = 4.0
"""Minimum score, in robust standard deviations from the median."""
LEAST_SPREAD = 0.03
"""Minimum spread, relative to the median, since a few ranks may agree by chance."""
AGAIN = 200
"""Steps after which a rank may be reported again."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        phase: the phase that loses the most time.
        ratio: the rank's own time in that phase, relative to the median of the others.
        steps: number of optimizer steps for which the rank has been slow.
    """

    rank: int
    phase: str
    ratio: float
    steps: int

    def __str__(self) -> str:
        return f"{self.phase} {self.ratio:.2f} times the median of the other ranks for {self.steps} steps"


class StragglerDetector:
    """Compares windows of steps. Call `look` whenever there are new counters.

    Args:
        groups: the group of each rank. Ranks of a group do the same work and are compared with each other; a
            single rank is not compared.

    Attributes:
        found: the ranks that are currently slow.
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self._members: dict[Hashable, list[int]] = {}
        for rank, group in enumerate(groups):
            self._members.setdefault(group, []).append(rank)
        self._begins: dict[Hashable, dict[int, StepCounters]] = {}
        self._slow_for: dict[int, tuple[int, int]] = {}  # rank -> (windows, steps)
        self._named_at: dict[int, int] = {}  # rank -> step of its last report
        self._steps = 0
        self.found: dict[int, Straggler] = {}

    def look(self, newest: Mapping[int, StepCounters]) -> list[Straggler]:
        """Return the newly detected slow ranks, except those reported recently."""
        new: list[Straggler] = []
        for group, members in self._members.items():
            if len(members) < 2 or any(rank not in newest for rank in members):
                continue
            now = {rank: newest[rank] for rank in members}
            begin = self._begins.setdefault(group, now)
            steps = {rank: int(now[rank].counted - begin[rank].counted) for rank in members}
            if min(steps.values()) < 0:  # the run was restarted
                self._begins[group] = now
            elif min(steps.values()) >= WINDOW:
                self._begins[group] = now
                self._steps = max(self._steps, *(int(counters.steps) for counters in now.values()))
                new += self._compared({rank: _own(begin[rank], now[rank]) for rank in members}, steps)
        return new

    def _compared(self, own: Mapping[int, Mapping[str, float]], steps: Mapping[int, int]) -> list[Straggler]:
        """Return the ranks to report. `own`: rank -> phase -> own seconds per step."""
        new = []
        for rank, times in own.items():
            others = [sum(own[other].values()) for other in own if other != rank]
            if not _is_far(sum(times.values()), others):
                self._slow_for.pop(rank, None)
                self.found.pop(rank, None)
                continue
            windows, slow = self._slow_for.get(rank, (0, 0))
            self._slow_for[rank] = windows + 1, slow + steps[rank]
            if windows + 1 < WINDOWS:
                continue
            middle = {phase: median(own[other][phase] for other in own if other != rank) for phase in COUNTED}
            phase = max(COUNTED, key=lambda name: times[name] - middle[name])
            ratio = times[phase] / max(middle[phase], 1e-9)
            self.found[rank] = Straggler(rank, phase, ratio, slow + steps[rank])
            if self._steps - self._named_at.get(rank, -AGAIN) >= AGAIN:
                self._named_at[rank] = self._steps
                new.append(self.found[rank])
        return new


def _own(begin: StepCounters, end: StepCounters) -> dict[str, float]:
    """Return the rank's own seconds per step by phase, without waits for other ranks."""
    steps = end.counted - begin.counted
    return {
        phase: (
            getattr(end, phase)
            - getattr(begin, phase)
            - getattr(end, f"{phase}_wait")
            + getattr(begin, f"{phase}_wait")
        )
        / steps
        for phase in COUNTED
    }


def _is_far(value: float, others: Sequence[float]) -> bool:
    middle = median(others)
    spread = 1.4826 * median(abs(other - middle) for other in others)
    return value > RATIO * middle and value - middle > SCORE * max(spread, LEAST_SPREAD * middle)
