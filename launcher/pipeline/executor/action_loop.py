"""The loop over the actions of a rank in a step, shared by the engine and by the memory estimate.

The engine and the estimate each implement `StageActions`. Sharing the loop guarantees that they agree on the
order of actions and on which backward is the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from launcher.pipeline.schedules.actions import Action, ActionKind


class StageActions(Protocol):
    """One method per kind of action. `last`: no later action of this rank computes weight gradients."""

    def around(self, action: Action) -> AbstractContextManager[None]:
        """Return the context manager in which an action of any kind runs."""

    def forward(self, action: Action) -> None:
        """Run a virtual stage; its outputs are kept for `backward` or `input_backward`."""

    def backward(self, action: Action, *, last: bool) -> None:
        """Compute the gradients of the stage's input and of its weights."""

    def input_backward(self, action: Action) -> None:
        """Compute the gradients of the stage's input, and defer those of the weights to `weight_backward`."""

    def weight_backward(self, action: Action, *, last: bool) -> None:
        """Compute the weight gradients that `input_backward` deferred."""

    def update(self, action: Action) -> None:
        """Run an optimizer step on the rank's weights in the middle of a step."""

    def receive(self, action: Action) -> None:
        """Wait for the tensors that the next action needs."""

    def send(self, action: Action) -> None:
        """Start sending the output or gradient that this stage computed for the microbatch."""


def run_actions(actions: Sequence[Action], stages: StageActions) -> None:
    """Run all actions of a rank in order.

    Args:
        actions: actions of a schedule, with transfers and updates (`transfers.py`).
    """
    last = _last_backward(actions)
    for action in actions:
        with stages.around(action):
            run_action(action, stages, last=action is last)


def _last_backward(actions: Sequence[Action]) -> Action | None:
    """Return the last action that computes weight gradients; None for an evaluation, without backward."""
    return next((a for a in reversed(actions) if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT)), None)


def run_action(action: Action, stages: StageActions, *, last: bool) -> None:
    """Run one action."""
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
