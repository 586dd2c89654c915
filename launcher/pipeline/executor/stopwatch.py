"""Measures when the actions of the last step ran. Two clock reads per action, no synchronisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from launcher.comm import Axis
from launcher.comm.collectives import profiler_range
from launcher.comm.plain import gather_plain
from launcher.monitor.clock import Moment, now, seconds_between
from launcher.pipeline.schedules.actions import COMPUTE, Action, ActionKind, PipelineSchedule

if TYPE_CHECKING:
    from launcher.pipeline.timeline.simulate import Timeline


class Stopwatch:
    """Records the start and end times of one rank's actions. All ranks of a node share one clock; the clocks
    of nodes are assumed to be synchronised over the network.

    Attributes:
        schedule: schedule of the last step; None before the first step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.schedule: PipelineSchedule | None = None
        self._marks: list[tuple[Action, Moment, Moment]] = []

    def begin(self, schedule: PipelineSchedule) -> None:
        """Begin a step. The device is idle at this point: its batch has just arrived."""
        self.schedule, self._marks = schedule, []
        self._time, self._moment = time.time(), now(self.device)

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Time an action; label it in traces of torch's profiler, too."""
        with profiler_range(action):
            if action.kind not in COMPUTE:
                yield
                return
            began = now(self.device)
            yield
            self._marks.append((action, began, now(self.device)))

    def timeline(self, axis: Axis) -> Timeline:
        """Gather the timeline of the last step from all stages: a collective along pp."""
        from launcher.pipeline.timeline.simulate import Span, Timeline

        assert self.schedule is not None, "there was a step"
        made = self.schedule
        mine = [
            (str(each.kind), each.stage, each.microbatch, self._at(first), self._at(last))
            for each, first, last in self._marks
        ]
        every = [mine] if axis.group is None else gather_plain(mine, axis.group)
        spans = tuple(
            tuple(
                Span(Action(ActionKind(kind), stage, number), start, end)
                for kind, stage, number, start, end in rank
            )
            for rank in every
        )
        return Timeline(made.name, made.stages, made.chunks, made.microbatches, spans)

    def _at(self, moment: Moment) -> float:
        """Return seconds since the epoch."""
        return self._time + seconds_between(self._moment, moment)
