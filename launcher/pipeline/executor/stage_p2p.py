"""Sends and receives between stages on different ranks. Receives are posted ahead, in the order of the sends.

For the first batch of each signature, a stage sends a `StageBoundary` ahead of the tensors: their shapes, and
how the next stage must continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from launcher.comm import Pending
from launcher.comm.p2p import P2PChannel
from launcher.comm.record import show_wait
from launcher.comm.transport import Way
from launcher.pipeline.crossing import Signature, StageBoundary, StagedPart, TensorShape
from launcher.pipeline.plain import packed, unpacked
from launcher.pipeline.schedules.actions import Action, ActionKind, PipelineSchedule
from launcher.pipeline.schedules.transfers import arrivals, matching_receive

AHEAD = 1  # receives of each kind from each rank that are posted before they are needed


def ways(schedule: PipelineSchedule) -> set[Way]:
    """Return the pairs of ranks that communicate, for activations and for gradients."""
    pairs = {pair for pair in pairwise(schedule.rank_of) if pair[0] != pair[1]}
    return {Way(*pair, back=False) for pair in pairs} | {Way(to, source, back=True) for source, to in pairs}


class StageP2P:
    """The p2p communication of one step.

    Args:
        staged: the rank's part of the model, which stores the boundaries, and so the shapes.
        channel: p2p channel of the pp axis.
        schedule: determines the messages and their order.
        signatures: signatures of the microbatches.
    """

    def __init__(
        self,
        staged: StagedPart,
        channel: P2PChannel,
        schedule: PipelineSchedule,
        signatures: Sequence[Signature],
        device: torch.device,
    ) -> None:
        self.staged, self.channel, self.schedule, self.signatures = staged, channel, schedule, signatures
        self.device = device
        self._expected = {
            key: deque(actions) for key, actions in arrivals(schedule)[channel.axis.rank].items()
        }
        self._boxes: dict[Action, tuple[tuple[Tensor, ...], list[Pending]]] = {}
        self._posted: dict[tuple[int, ActionKind], int] = {}
        self._outgoing: dict[Action, list[Pending]] = {}

    def send(self, action: Action, tensors: tuple[Tensor, ...], learned: StageBoundary | None) -> None:
        """Start sending the tensors of an action.

        Args:
            action: SEND_F or SEND_B.
            learned: sent before the tensors; None: the receiver has it already.
        """
        to = self.schedule.rank_of[matching_receive(action).stage]
        back, tag = action.kind is ActionKind.SEND_B, f"stage{action.stage}/{action.kind.lower()}"
        outgoing = self._outgoing[action] = []
        if learned is not None:
            content = packed(learned).to(self.device)
            size = torch.tensor([content.numel()], device=self.device)
            outgoing += [self.channel.send(part, to, tag) for part in (size, content)]
        outgoing += [self.channel.send(tensor, to, tag, back=back) for tensor in tensors]

    def receive(self, action: Action) -> tuple[Tensor, ...]:
        """Wait for the tensors of a RECV_F or RECV_B, and return them."""
        key = self._source(action), action.kind
        while action not in self._boxes:
            self._post(key)
        tensors, pendings = self._boxes.pop(action)
        self._posted[key] -= 1
        self._post_ahead(key)
        what = "gradients" if action.kind is ActionKind.RECV_B else "inputs"
        show_wait(f"the wait for {what} of stage {action.stage}, microbatch {action.microbatch}")
        for pending in pendings:
            pending.wait()
        if (
            action.kind is ActionKind.RECV_B
        ):  # The activation of this gradient has arrived: wait for its send now, to free its memory.
            self._wait_for(Action(ActionKind.SEND_F, action.stage, action.microbatch))
        return tensors

    def finish(self) -> None:
        """Wait for all sends to complete."""
        for action in list(self._outgoing):
            self._wait_for(action)

    # ---- inside -----------------------------------------------------------------------------

    def _wait_for(self, action: Action) -> None:
        for pending in self._outgoing.pop(action):
            pending.wait()

    def _source(self, action: Action) -> int:
        return self.schedule.rank_of[action.stage + (1 if action.kind is ActionKind.RECV_B else -1)]

    def _post_ahead(self, key: tuple[int, ActionKind]) -> None:
        """Post the next receives whose shapes are known."""
        expected, ahead = self._expected[key], AHEAD if self.channel.posts_ahead else 0
        while expected and self._posted.get(key, 0) < ahead and self._shapes(expected[0]) is not None:
            self._post(key)

    def _post(self, key: tuple[int, ActionKind]) -> None:
        source, kind = key
        action = self._expected[key].popleft()
        back, tag = kind is ActionKind.RECV_B, f"stage{action.stage}/{kind.lower()}"
        shapes = self._shapes(action)
        if shapes is None:
            shapes = self._learn(action, source, tag)
        tensors = tuple(torch.empty(shape.size, dtype=shape.dtype, device=self.device) for shape in shapes)
        pendings = [self.channel.receive(tensor, source, tag, back=back) for tensor in tensors]
        self._boxes[action] = tensors, pendings
        self._posted[key] = self._posted.get(key, 0) + 1

    def _shapes(self, action: Action) -> tuple[TensorShape, ...] | None:
        """Return the shapes to receive; those of gradients are those of the floating-point tensors that were
        sent. None: the boundary is not known yet."""
        edge = action.stage if action.kind is ActionKind.RECV_B else action.stage - 1
        learned = self.staged.learned(edge, self.signatures[action.microbatch])
        if learned is None:
            return None
        return learned.returning if action.kind is ActionKind.RECV_B else learned.shapes

    def _learn(self, action: Action, source: int, tag: str) -> tuple[TensorShape, ...]:
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        self.channel.receive(size, source, tag).wait()
        content = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self.channel.receive(content, source, tag).wait()
        learned = unpacked(content)
        if not isinstance(learned, StageBoundary):
            raise ValueError(f"stage {action.stage - 1} sent a {type(learned).__name__} instead of shapes")
        self.staged.tell(action.stage - 1, self.signatures[action.microbatch], learned)
        return learned.shapes
