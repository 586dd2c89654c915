"""What follows from who computes what: what ranks send each other, and when a rank changes its weights by itself.

A SEND stands right after the action that makes what is sent, and does not wait. A RECV stands right before the action
that needs what is received, and is the wait for it: receives are posted ahead, in the order in which they arrive
(`arrivals`), because a pair of ranks has no tags. Nothing is sent between virtual stages of one rank. An UPDATE stands
after a backward and its SEND, so that nobody waits for it.
"""

from __future__ import annotations

from functools import lru_cache

from launcher.pipeline.schedules.actions import GIVES_INPUT_GRADIENT, Action, ActionKind, PipelineSchedule
from launcher.pipeline.schedules.check import check


@lru_cache(maxsize=16)  # the same at every step
def with_transfers(schedule: PipelineSchedule) -> tuple[tuple[Action, ...], ...]:
    """All that each rank does, in order: the schedule's actions with SEND, RECV and UPDATE between them.

    Raises:
        LauncherError: the schedule cannot be run (`check.py`).
    """
    check(schedule)
    return tuple(actions_of(schedule, rank) for rank in range(len(schedule.actions)))


def actions_of(schedule: PipelineSchedule, rank: int) -> tuple[Action, ...]:
    """The same of one rank, of a schedule that is known to run."""
    return tuple(step for action in schedule.actions[rank] for step in _surrounded(schedule, action))


@lru_cache(maxsize=16)
def arrivals(schedule: PipelineSchedule) -> tuple[dict[tuple[int, ActionKind], tuple[Action, ...]], ...]:
    """What reaches each rank, in the order in which the sender sends it.

    Returns:
        for each rank, by (source rank, RECV_F or RECV_B): the RECV actions of this rank. This order need not be the one
        in which the rank waits for them.
    """
    inbound: list[dict[tuple[int, ActionKind], list[Action]]] = [{} for _ in schedule.actions]
    for source, actions in enumerate(with_transfers(schedule)):
        for action in actions:
            if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                received = matching_receive(action)
                target = schedule.rank_of[received.stage]
                inbound[target].setdefault((source, received.kind), []).append(received)
    return tuple({key: tuple(received) for key, received in of_rank.items()} for of_rank in inbound)


def matching_receive(send: Action) -> Action:
    """The RECV of a SEND, at the virtual stage after or before it."""
    if send.kind is ActionKind.SEND_F:
        return Action(ActionKind.RECV_F, send.stage + 1, send.microbatch)
    return Action(ActionKind.RECV_B, send.stage - 1, send.microbatch)


def _surrounded(schedule: PipelineSchedule, action: Action) -> list[Action]:
    """An action with what it receives, sends and updates."""
    stage, microbatch = action.stage, action.microbatch

    def away(other: int) -> bool:
        inside = 0 <= other < schedule.virtual_stages
        return inside and schedule.rank_of[other] != schedule.rank_of[stage]

    steps = [action]
    if action.kind is ActionKind.FORWARD:
        if away(stage - 1):
            steps.insert(0, Action(ActionKind.RECV_F, stage, microbatch))
        if away(stage + 1):
            steps.append(Action(ActionKind.SEND_F, stage, microbatch))
    elif action.kind in GIVES_INPUT_GRADIENT:
        if away(stage + 1):
            steps.insert(0, Action(ActionKind.RECV_B, stage, microbatch))
        if away(stage - 1):
            steps.append(Action(ActionKind.SEND_B, stage, microbatch))
        if schedule.updates_inside:
            steps.append(Action(ActionKind.UPDATE, stage, microbatch))
    return steps
