"""The registry of schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from launcher.errors import ConfigError
from launcher.pipeline.schedules.actions import PipelineSchedule
from launcher.pipeline.schedules.synchronous import gpipe, interleaved, one_f_one_b, zb_h1, zbv


@dataclass(frozen=True)
class ScheduleBuilder:
    """The builder of one schedule.

    Args:
        make: (stages, microbatches, chunks) -> PipelineSchedule.
        chunks: the fixed number of virtual stages per rank; None: the user chooses.
        drained: name of the schedule to use where no weights change, for evaluation and for the placement of
            stages; "": this schedule.
    """

    make: Callable[[int, int, int], PipelineSchedule]
    chunks: int | None = 1
    drained: str = ""


def _pipedream(stages: int, microbatches: int, chunks: int) -> PipelineSchedule:
    from launcher.pipeline.schedules.asynchronous import pipedream  # few runs use it

    return pipedream(stages, microbatches, chunks)


def _two_buffered_weights(stages: int, microbatches: int, chunks: int) -> PipelineSchedule:
    from launcher.pipeline.schedules.asynchronous import two_buffered_weights

    return two_buffered_weights(stages, microbatches, chunks)


ONE_STAGE = "1f1b"
"""The schedule of an uncut model: each forward is followed by its backward."""


@lru_cache(maxsize=64)  # the same at every step
def schedule(name: str, stages: int, microbatches: int, chunks: int | None = None) -> PipelineSchedule:
    """Return the schedule with this name.

    Args:
        name: a key of `SCHEDULES`.
        stages: number of ranks of the pp axis, P. Every schedule supports 1, with nothing to overlap.
        microbatches: microbatches per step, m.
        chunks: virtual stages per rank, v; None: the schedule's own number, 2 for interleaved.

    Raises:
        ConfigError: the name is unknown, or the schedule does not support these numbers.
    """
    where = "pipeline schedule"
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r}", where=where, fix="use one of " + ", ".join(SCHEDULES))
    for what, number in (("stages", stages), ("microbatches", microbatches)):
        if number < 1:
            raise ConfigError(f"{what} is {number}", where=where, fix="use an integer of at least 1")
    maker = SCHEDULES[name]
    if maker.chunks is None:
        chunks = 2 if chunks is None else chunks
        if chunks < 2:
            raise ConfigError(
                f"{name} does not support {chunks} chunks",
                where=where,
                fix='use at least 2 chunks; with one chunk, use "1f1b"',
            )
        return maker.make(stages, microbatches, chunks)
    if chunks not in (None, maker.chunks):
        raise ConfigError(
            f"{name} has {maker.chunks} chunks per rank, not {chunks}",
            where=where,
            fix='omit chunks; "interleaved" supports any number from 2',
        )
    return maker.make(stages, microbatches, maker.chunks)


SCHEDULES = {
    "gpipe": ScheduleBuilder(gpipe),
    "1f1b": ScheduleBuilder(one_f_one_b),
    "interleaved": ScheduleBuilder(interleaved, chunks=None),
    "zb-h1": ScheduleBuilder(zb_h1),
    "zbv": ScheduleBuilder(zbv, chunks=2),
    "pipedream": ScheduleBuilder(_pipedream, drained="1f1b"),
    "2bw": ScheduleBuilder(_two_buffered_weights, drained="1f1b"),
}


def drained(name: str) -> str:
    """Return the name of the schedule to use in place of `name` where no weights change."""
    return SCHEDULES[name].drained or name
