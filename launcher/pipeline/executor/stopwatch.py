"""Measures when the actions of the last step ran. It reads the clock twice an action, and waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from launcher.comm import Axis
from launcher.comm.plain import gather_plain
from launcher.monitor.clock import Moment, now, seconds_between
from launcher.pipeline.schedules.actions import COMPUTE, Action, ActionKind, PipelineSchedule

if TYPE_CHECKING:
    from launcher.pipeline.timeline.simulate import Timeline


class Stopwatch:
    """The start and end times of one rank's operations. All ranks of a machine have one clock, and machines set
    theirs by the network.

    Attributes:
        schedule: of the last step; None before the first one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.schedule: PipelineSchedule | None = None
        self._marks: list[tuple[Action, Moment, Moment]] = []

    def begin(self, schedule: PipelineSchedule) -> None:
        """A step begins. The device has nothing to do: its batch has just come."""
        self.schedule, self._marks = schedule, []
        self._time, self._moment = time.time(), now(self.device)

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Around an action; its name is in traces of torch's profiler, too."""
        with record_function(str(action)):
            if action.kind not in COMPUTE:
                yield
                return
            began = now(self.device)
            yield
            self._marks.append((action, began, now(self.device)))

    def timeline(self, axis: Axis) -> Timeline:
        """The last step on all stages; a collective along pp, after a step."""
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
