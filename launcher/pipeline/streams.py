"""Schedules that do not drain between steps: many steps as one, and which weights a microbatch sees."""

from __future__ import annotations

from dataclasses import replace

from launcher.errors import ConfigError
from launcher.pipeline.actions import GIVES_INPUT_GRADIENT, ActionKind, PipelineSchedule
from launcher.pipeline.schedules import schedule as make


def stream(one_step: PipelineSchedule, steps: int) -> PipelineSchedule:
    """Several steps with no draining between them.

    Args:
        one_step: an asynchronous schedule.
        steps: how many; microbatches are numbered through, so that microbatch j is of step j // m.

    Raises:
        ConfigError: the schedule drains; its steps follow each other as they are.
    """
    if one_step.flushes:
        raise ConfigError(
            f"{one_step.name} drains after each step", where="pipeline schedule", fix="run it step by step"
        )
    joined = make(one_step.name, one_step.stages, one_step.microbatches * steps)
    return replace(joined, update_every=one_step.update_every)


def weights_used(schedule: PipelineSchedule) -> tuple[tuple[int, ...], ...]:
    """For each rank and microbatch: how many updates the weights of its forward and backward have behind them.

    Counted from the first action of the schedule. 0 throughout where the pipeline drains. pipedream takes the newest
    weights of the rank; 2bw those from before the last step, on all ranks, so that they agree.
    """
    if schedule.delay is not None:
        steps = (number // schedule.update_every for number in range(schedule.microbatches))
        return (tuple(max(0, step - schedule.delay) for step in steps),) * schedule.stages
    used = []
    for actions in schedule.actions:
        updates, of_rank = 0, []
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                of_rank.append(updates)
            updates += action.kind in GIVES_INPUT_GRADIENT
        used.append(tuple(of_rank))
    return tuple(used)
