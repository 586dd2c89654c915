"""The loop over the actions of a rank in a step: the engine computes in it, and the memory estimate counts bytes.

What an action is to whoever goes through it is a `StageActions`. So the two cannot disagree on what comes when, and on
which backward is the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from launcher.pipeline.schedules.actions import Action, ActionKind


class StageActions(Protocol):
    """Does the actions of each kind; `last` says that it is the last backward of this rank in this step."""

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Return what an action of any kind is done in."""

    def forward(self, action: Action) -> None:
        """Run a virtual stage; its outputs wait for `backward` or `input_backward`."""

    def backward(self, action: Action, *, last: bool) -> None:
        """Compute the gradients of the stage's input and of its weights."""

    def input_backward(self, action: Action) -> None:
        """Compute the gradients of the stage's input, and leave those of the weights to `weight_backward`."""

    def weight_backward(self, action: Action, *, last: bool) -> None:
        """Compute the gradients of the weights that `input_backward` has left."""

    def update(self, action: Action) -> None:
        """Step the weights of the rank, which change inside of the step."""

    def receive(self, action: Action) -> None:
        """Wait for what the following action needs."""

    def send(self, action: Action) -> None:
        """Start sending what the action before has made."""


def run_actions(actions: Sequence[Action], stages: StageActions) -> None:
    """Do all actions of a rank in their order.

    Args:
        actions: those of a schedule, with transfers and updates between them (`transfers.py`).
    """
    last = _last_backward(actions)
    for action in actions:
        with stages.around(action):
            run_action(action, stages, last=action is last)


def _last_backward(actions: Sequence[Action]) -> Action | None:
    """Return the action with the last gradients of weights; None: there is no backward, as in an evaluation."""
    return next((a for a in reversed(actions) if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)), None)


def run_action(action: Action, stages: StageActions, *, last: bool) -> None:
    """Do one of them."""
    match action.kind:
        case ActionKind.FORWARD:
            stages.forward(action)
        case ActionKind.BACKWARD:
            stages.backward(action, last=last)
        case ActionKind.INPUT:
            stages.input_backward(action)
        case ActionKind.WEIGHT:
            stages.weight_backward(action, last=last)
        case ActionKind.UPDATE:
            stages.update(action)
        case ActionKind.RECV_F | ActionKind.RECV_B:
            stages.receive(action)
        case ActionKind.SEND_F | ActionKind.SEND_B:
            stages.send(action)
