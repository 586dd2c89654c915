"""`Action` and `PipelineSchedule`: the actions of each rank of a pipeline, as data. Glossary of the package.

stages (P)      number of ranks of the pp axis.
chunks (v)      number of virtual stages per rank.
virtual stage   k in 0 .. P*v - 1, in model order; `rank_of[k]` holds it.
microbatch      index in 0 .. m - 1.

One runtime executes any schedule; the same lists are checked, simulated and drawn. Standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """The kind of work that an action does for one microbatch in one virtual stage."""

    FORWARD = "F"
    BACKWARD = "B"  # full backward: gradients of the input and of the weights
    INPUT = "I"  # the gradient of the input only
    WEIGHT = "W"  # the weight gradients that INPUT deferred
    SEND_F = "SEND_F"  # send the stage's output to the next virtual stage
    RECV_F = "RECV_F"  # wait for the stage's input
    SEND_B = "SEND_B"  # send the gradient of the stage's input to the previous virtual stage
    RECV_B = "RECV_B"  # wait for the gradient of the stage's output
    UPDATE = "U"  # optimizer step on the rank's weights, with the gradients since the previous update

    __hash__ = str.__hash__  # Enum's own hash is Python code, too slow for thousands of lookups


COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)


WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "input gradient",
    ActionKind.WEIGHT: "weight gradients",
    ActionKind.SEND_F: "sending the activations",
    ActionKind.RECV_F: "receiving the activations",
    ActionKind.SEND_B: "sending the gradients",
    ActionKind.RECV_B: "receiving the gradients",
    ActionKind.UPDATE: "update with the gradients",
}
GIVES_INPUT_GRADIENT = (ActionKind.BACKWARD, ActionKind.INPUT)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action of a rank. Its `str` consists of kind, virtual stage and microbatch: `F2.0`."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def in_words(self) -> str:
        """Return a description, such as "forward of microbatch 2"."""
        return f"{WORDS[self.kind]} of microbatch {self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of every rank of a pipeline in one step, in order.

    Args:
        name: key of `registry.SCHEDULES`.
        stages, chunks, microbatches: P, v and m.
        rank_of: the pp rank of each virtual stage.
        actions: the compute actions of each rank (F, and B or I and W); transfers follow from them
            (`transfers.py`).
        held: for each rank, the most (virtual stage, microbatch) pairs whose activations it holds at once. An
            activation is held from its F to the end of its B or I.
        deferred: for each rank, the most pairs whose weight gradients are deferred at once. From I to W, the
            inputs of layers with weights and the gradients of their outputs are kept; the rest of the
            activation is freed after the I. 0 without I and W.
        weight_versions: how many versions of its weights each rank keeps.
        update_every: microbatches between two updates of the weights.
        flushes: whether the pipeline drains before the weights change. If not, training is NOT equivalent to
            that of one process: a microbatch uses weights that are some updates old (`asynchronous.py`).
        delay: by how many updates the weights of a microbatch lag behind those of one process, the same on
            all ranks; None: each rank uses its newest weights, and updates them after each of its backwards.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    held: tuple[int, ...]
    deferred: tuple[int, ...]
    weight_versions: tuple[int, ...]
    update_every: int
    flushes: bool = True
    delay: int | None = 0

    @property
    def virtual_stages(self) -> int:
        """Return P * v."""
        return self.stages * self.chunks

    @property
    def updates_inside(self) -> bool:
        """Return whether each rank updates its weights on its own, between the actions of a step."""
        return self.delay is None

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of a rank, in model order; the position is the chunk."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)


def dependencies(schedule: PipelineSchedule) -> dict[Action, tuple[Action, ...]]:
    """Return, for each action, the actions that must end before it starts.

    F(k, m) needs F(k-1, m). B(k, m) and I(k, m) need F(k, m), and B or I of (k+1, m). W(k, m) needs I(k, m).
    Actions missing from the lists are missing here, too: `check` reports them.
    """
    known = {action for actions in schedule.actions for action in actions}
    return {action: needs(action, schedule.virtual_stages, known) for action in known}


def needs(action: Action, virtual_stages: int, known: Collection[Action]) -> tuple[Action, ...]:
    """Return the actions that must end before `action` starts; `known`: all actions of the step."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is ActionKind.WEIGHT:
        return (Action(ActionKind.INPUT, stage, microbatch),)
    if kind is ActionKind.FORWARD:
        return (Action(ActionKind.FORWARD, stage - 1, microbatch),) if stage else ()
    after = (Action(back, stage + 1, microbatch) for back in GIVES_INPUT_GRADIENT)
    return (Action(ActionKind.FORWARD, stage, microbatch), *(needed for needed in after if needed in known))


def walk(
    schedule: PipelineSchedule, needs: dict[Action, tuple[Action, ...]]
) -> tuple[list[tuple[int, Action]], dict[int, Action]]:
    """Run the lists: each rank in order, each action once its dependencies are done.

    Returns:
        (rank, action) pairs, each after its dependencies; and rank -> the action at which the rank is stuck,
        empty if the schedule has no deadlock.
    """
    order: list[tuple[int, Action]] = []
    done: set[Action] = set()
    position = [0] * len(schedule.actions)
    waiting: dict[Action, list[int]] = {}  # missing action -> ranks that wait for it
    ready = deque(range(len(schedule.actions)))
    while ready:
        rank = ready.popleft()
        while position[rank] < len(schedule.actions[rank]):
            action = schedule.actions[rank][position[rank]]
            missing = next((needed for needed in needs[action] if needed not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            order.append((rank, action))
            position[rank] += 1
            ready.extend(waiting.pop(action, ()))
    stuck = {
        rank: actions[position[rank]]
        for rank, actions in enumerate(schedule.actions)
        if position[rank] < len(actions)
    }
    return order, stuck
