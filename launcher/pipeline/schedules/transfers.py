"""Adds transfers between ranks, and weight updates inside of a step, to a schedule.

A SEND comes right after the action that computes the data, and does not block. A RECV comes right before the
action that needs the data, and waits for it: receives are posted ahead, in the order of arrival (`arrivals`),
because p2p between two ranks has no tags. Nothing is sent between virtual stages of one rank. An UPDATE comes
after a backward and its SEND, so that no other rank waits for it.
"""

from __future__ import annotations

from functools import lru_cache

from launcher.pipeline.schedules.actions import GIVES_INPUT_GRADIENT, Action, ActionKind, PipelineSchedule
from launcher.pipeline.schedules.check import check


@lru_cache(maxsize=16)  # the same at every step
def with_transfers(schedule: PipelineSchedule) -> tuple[tuple[Action, ...], ...]:
    """Return all actions of each rank, in order: those of the schedule with SEND, RECV and UPDATE inserted.

    Raises:
        LauncherError: the schedule cannot run (`check.py`).
    """
    check(schedule)
    return tuple(actions_of(schedule, rank) for rank in range(len(schedule.actions)))


def actions_of(schedule: PipelineSchedule, rank: int) -> tuple[Action, ...]:
    """Return the actions of one rank as in `with_transfers`, for a schedule that has been checked."""
    return tuple(step for action in schedule.actions[rank] for step in _surrounded(schedule, action))


@lru_cache(maxsize=16)
def arrivals(schedule: PipelineSchedule) -> tuple[dict[tuple[int, ActionKind], tuple[Action, ...]], ...]:
    """Return the receives of each rank, in the order in which the sender sends.

    Returns:
        for each rank, (source rank, RECV_F or RECV_B) -> the RECV actions of this rank. The rank may wait for
        them in another order.
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
    """Return the RECV that matches a SEND, at the next or the previous virtual stage."""
    if send.kind is ActionKind.SEND_F:
        return Action(ActionKind.RECV_F, send.stage + 1, send.microbatch)
    return Action(ActionKind.RECV_B, send.stage - 1, send.microbatch)


def _surrounded(schedule: PipelineSchedule, action: Action) -> list[Action]:
    """Return an action with its RECV before it, and its SEND and UPDATE after it."""
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
