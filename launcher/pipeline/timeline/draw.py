"""Draws a schedule as a text grid in unit time: the staircase of the papers."""

from __future__ import annotations

from launcher.pipeline.schedules.actions import PipelineSchedule
from launcher.pipeline.timeline.simulate import MicrobatchCosts, Span, simulate

IDLE = "."


def grid(schedule: PipelineSchedule) -> str:
    """Return one line per rank, one column per time unit: F, I and W of a virtual stage take 1, B takes 2.

    A cell contains kind and microbatch, followed by a letter for the chunk if ranks have several: `F0a`,
    `F0b`.
    """
    timeline = simulate(schedule, MicrobatchCosts.even(schedule.virtual_stages, 1, 1, 1))
    labels = [[_label(schedule, rank, span) for span in spans] for rank, spans in enumerate(timeline.spans)]
    width = max(len(label) for of_rank in labels for label in of_rank)
    name_width = len(f"rank {schedule.stages - 1}")
    lines = []
    for rank, spans in enumerate(timeline.spans):
        cells, now = [], 0
        for span, label in zip(spans, labels[rank], strict=True):
            start, units = round(span.start), round(span.end - span.start)
            cells += [IDLE.ljust(width)] * (start - now)
            cells.append(label.ljust(width) if units == 1 else label.ljust(units * (width + 1) - 1, "-"))
            now = start + units
        lines.append(f"{f'rank {rank}':<{name_width}}  {' '.join(cells)}".rstrip())
    return "\n".join(lines)


def _label(schedule: PipelineSchedule, rank: int, span: Span) -> str:
    action = span.action
    chunk = schedule.stages_of(rank).index(action.stage)
    return f"{action.kind}{action.microbatch}" + (chr(ord("a") + chunk) if schedule.chunks > 1 else "")
