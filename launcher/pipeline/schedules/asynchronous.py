"""Experimental: schedules that do not drain before the weights change, and which weights a microbatch sees.

Their gradients are those of older weights, so training is NOT that of one process.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.errors import ConfigError
from launcher.pipeline.schedules.actions import GIVES_INPUT_GRADIENT, ActionKind, PipelineSchedule
from launcher.pipeline.schedules.synchronous import one_f_one_b


def pipedream(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Build PipeDream (Narayanan et al., SOSP 2019): 1F1B that never drains; the weights change after each backward.

    NOT equal to synchronous training. The forward of a microbatch takes the newest weights of its rank, and its
    backward the same ones, which are kept for it: up to P - r versions on rank r. Ranks differ in how old they are.
    The list is that of one step between an empty pipeline and an empty one.
    """
    drained = one_f_one_b(stages, microbatches)
    return replace(
        drained, name="pipedream", weight_versions=drained.held, update_every=1, flushes=False, delay=None
    )


def two_buffered_weights(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Build PipeDream-2BW (Narayanan et al. 2006.09503): 1F1B that never drains; weights change after m microbatches.

    NOT equal to synchronous training: step t takes, on all ranks, the weights from before step t - 1, and so a gradient
    is one update old. Two versions are kept. Needs m >= P, else the weights of a step are not ready when it starts.

    Raises:
        ConfigError: m < P.
    """
    if microbatches < stages:
        raise ConfigError(
            f"2bw with {microbatches} microbatches on {stages} stages",
            where="pipeline schedule",
            fix=f"{stages} microbatches or more",
        )
    drained = one_f_one_b(stages, microbatches)
    return replace(drained, name="2bw", weight_versions=(2,) * stages, flushes=False, delay=1)


def weights_used(schedule: PipelineSchedule) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank and microbatch, how many updates the weights of its forward and backward have behind them.

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
