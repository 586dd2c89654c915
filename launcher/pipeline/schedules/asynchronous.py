"""Experimental schedules that do not drain before the weights change, and the weight versions they use.

Gradients are computed with stale weights, so training is NOT equivalent to that of one process.
"""

from __future__ import annotations

from dataclasses import replace

from launcher.errors import ConfigError
from launcher.pipeline.schedules.actions import GIVES_INPUT_GRADIENT, ActionKind, PipelineSchedule
from launcher.pipeline.schedules.synchronous import one_f_one_b


def pipedream(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Build PipeDream (Narayanan et al., SOSP 2019): 1F1B that never drains, with updates after each
    backward.

    NOT equal to synchronous training. The forward of a microbatch uses the newest weights of its rank, and
    its backward uses the same version, which is stashed: up to P - r versions on rank r. Staleness differs
    between ranks. The actions are those of one step that starts and ends with an empty pipeline.
    """
    drained = one_f_one_b(stages, microbatches)
    return replace(
        drained, name="pipedream", weight_versions=drained.held, update_every=1, flushes=False, delay=None
    )


def two_buffered_weights(stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Build PipeDream-2BW (Narayanan et al. 2006.09503): never drains; weights change every m microbatches.

    NOT equal to synchronous training: on all ranks, step t uses the weights from before step t - 1, so
    gradients are one update old. Two versions are kept. Needs m >= P, so that the weights of a step are ready
    in time.

    Raises:
        ConfigError: m < P.
    """
    if microbatches < stages:
        raise ConfigError(
            f"2bw does not support {microbatches} microbatches on {stages} stages",
            where="pipeline schedule",
            fix=f"use at least {stages} microbatches",
        )
    drained = one_f_one_b(stages, microbatches)
    return replace(drained, name="2bw", weight_versions=(2,) * stages, flushes=False, delay=1)


def weights_used(schedule: PipelineSchedule) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank and microbatch, the version of the weights that its forward and backward use.

    Versions count updates since the first action of the schedule: all 0 if the pipeline drains. pipedream
    uses the newest weights of each rank; 2bw uses those from before the last step on all ranks, so that the
    ranks agree.
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
