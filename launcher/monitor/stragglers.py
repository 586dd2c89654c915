"""Ranks that compute more slowly than those with the same work: who, in which phase, by how much, for how long.

What a rank waits for others is no work of its own, so it does not count: the others of a slow rank wait. Each rank is
compared with the median of the others, by a robust score (median absolute deviation; Iglewicz & Hoaglin 1993).
Standard library only: the front end looks, which has no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.monitor.flight_recorder import COUNTED, StepCounters

WINDOW = 5
"""Optimizer steps whose mean is compared."""
WINDOWS = 2
"""A rank is named when so many windows in a row found it slow: after 15 steps at the most, where steps take longer than
the times between two looks."""
RATIO = 1.2
"""Less than so much more time than the others is not worth a word."""
SCORE = 4.0
"""Deviations from the median."""
LEAST_SPREAD = 0.03
"""Of the median: few ranks may agree by chance."""
AGAIN = 200
"""Steps after which a rank may be named once more."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        phase: where it loses most.
        ratio: its own time of that phase, over the median of the others.
        steps: for how many optimizer steps it has been found slow.
    """

    rank: int
    phase: str
    ratio: float
    steps: int

    def __str__(self) -> str:
        return f"{self.phase} {self.ratio:.2f} times the median of the others for {self.steps} steps"


class StragglerDetector:
    """Compares windows of steps. Call `look` with the newest counters, as often as there are new ones.

    Args:
        groups: of each rank; those of a group do the same work. A rank that is alone in its group has nobody to be
            compared with.

    Attributes:
        found: the ranks that are slow at present.
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self._members: dict[Hashable, list[int]] = {}
        for rank, group in enumerate(groups):
            self._members.setdefault(group, []).append(rank)
        self._begins: dict[Hashable, dict[int, StepCounters]] = {}
        self._slow_for: dict[int, tuple[int, int]] = {}  # windows, steps
        self._named_at: dict[int, int] = {}  # rank -> steps that had been looked at
        self._steps = 0
        self.found: dict[int, Straggler] = {}

    def look(self, newest: Mapping[int, StepCounters]) -> list[Straggler]:
        """Return the ranks that have just been found slow, and were not named lately."""
        new: list[Straggler] = []
        for group, members in self._members.items():
            if len(members) < 2 or any(rank not in newest for rank in members):
                continue
            now = {rank: newest[rank] for rank in members}
            begin = self._begins.setdefault(group, now)
            steps = {rank: int(now[rank].counted - begin[rank].counted) for rank in members}
            if min(steps.values()) < 0:  # started again
                self._begins[group] = now
            elif min(steps.values()) >= WINDOW:
                self._begins[group] = now
                self._steps = max(self._steps, *(int(counters.steps) for counters in now.values()))
                new += self._compared({rank: _own(begin[rank], now[rank]) for rank in members}, steps)
        return new

    def _compared(self, own: Mapping[int, Mapping[str, float]], steps: Mapping[int, int]) -> list[Straggler]:
        """Return those named for the first time. `own`: rank -> phase -> own seconds of a step."""
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
    """Return the seconds of a step that a rank has worked itself, by phase."""
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
