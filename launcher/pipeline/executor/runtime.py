"""Executes a list of actions, for any schedule and any model. An uncut model is a single stage.

Inputs and outputs of an action, for virtual stage k and microbatch m:

F(k, m)   takes the outputs of stage k - 1 for m; its own outputs are kept for B or I
B(k, m)   takes the gradients of these outputs; computes those of the inputs of F and of the weights
I(k, m)   as B, but defers the weight gradients of linear layers
W(k, m)   computes the deferred weight gradients
U(k, m)   steps the rank's weights; only if they change inside of a step

In asynchronous training, F and B run with the weights that `asynchronous.weights_used` specifies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from launcher.comm import Axis
from launcher.comm.p2p import P2PChannel
from launcher.errors import LauncherError
from launcher.pipeline.crossing import Signature, StageBoundary, StagedPart, signature_of
from launcher.pipeline.executor.action_loop import run_actions
from launcher.pipeline.executor.batches import LazySequence
from launcher.pipeline.executor.stage_p2p import StageP2P, ways
from launcher.pipeline.executor.stopwatch import Stopwatch
from launcher.pipeline.schedules import drained
from launcher.pipeline.schedules import schedule as schedule_of
from launcher.pipeline.schedules.actions import Action, ActionKind, PipelineSchedule
from launcher.pipeline.schedules.transfers import with_transfers
from launcher.tensor.weight_gradients import DeferredWeightGrads, putting_off

MicrobatchKey = tuple[int, int]  # virtual stage, microbatch


class StageExecutor(Protocol):
    """The interface of an engine that the actions of a step use."""

    def forward(self, module: nn.Module, batch: Any) -> Any:
        """Return the model's output, computed under autocast and timers."""

    def loss(self, output: Any) -> Tensor:
        """Return the scalar loss from the output of the last stage."""

    def backward(
        self, stage: int, outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        """Run backward from the outputs of a virtual stage to its leaves. `last`: the last backward of this
        rank in this step. No outputs: nothing before them is trained."""

    def finish(self, put_off: DeferredWeightGrads, *, last: bool) -> None:
        """Compute deferred weight gradients."""

    def root_gradient(self, microbatch: int) -> float:
        """Return the factor that the loss of a microbatch is multiplied by."""

    def see(self, version: int) -> None:
        """Select the weights of the next forward or backward, by the number of updates since the step began;
        negative for older versions. Never called in synchronous training."""

    def update(self, needed: Collection[int]) -> None:
        """Run an optimizer step on this rank's weights; keep the older versions in `needed`, which will be
        used again."""


@dataclass
class SavedForward:
    """The record of a forward whose backward is pending. Activations are saved by autograd only.

    Attributes:
        received: leaves that get the gradients of the received floating-point tensors, in order.
        outputs: where backward starts, for each floating-point output; None: the output needs no gradient.
    """

    received: tuple[Tensor, ...]
    outputs: tuple[GradientEdge | None, ...]


class Runtime:
    """Runs the stages of a rank, one step at a time.

    Args:
        staged: the rank's part of the model.
        axis: the pp axis.
        name, chunks: name and chunks of the schedule.

    Attributes:
        most_held: the most (virtual stage, microbatch) activations held at once in the last step.
        most_deferred: the most weight gradients of such pairs deferred at once.
        stopwatch: records when actions ran.
    """

    def __init__(self, staged: StagedPart, axis: Axis, name: str, chunks: int, device: torch.device) -> None:
        self.staged, self.axis, self.name, self.chunks, self.device = staged, axis, name, chunks, device
        self.channel = P2PChannel(axis)
        self.channel.open(ways(self.drained(1)))
        if not staged.is_whole:  # in a whole model, autograd accumulates every gradient
            from launcher.tensor.layers import give_own_backward

            for _, block in staged.blocks:
                give_own_backward(block)
        self.most_held = self.most_deferred = 0
        self.stopwatch = Stopwatch(device)

    def schedule(self, microbatches: int) -> PipelineSchedule:
        return schedule_of(self.name, self.axis.degree, microbatches, self.chunks)

    def drained(self, microbatches: int) -> PipelineSchedule:
        """Return the schedule to use where no weights change."""
        return schedule_of(drained(self.name), self.axis.degree, microbatches, self.chunks)

    def run(self, batches: Sequence[Any], executor: StageExecutor, *, training: bool) -> list[Tensor]:
        """Run the forwards of microbatches through all stages, and if `training` their backwards.

        Args:
            batches: all microbatches, on every rank; each is read when its forward starts.

        Returns:
            their losses, detached, on the rank of the last virtual stage; an empty list on other ranks.
        """
        schedule = self.schedule(len(batches)) if training else _forwards(self.drained(len(batches)))
        signatures = LazySequence(len(batches), lambda m: signature_of(batches[m]))
        p2p = StageP2P(self.staged, self.channel, schedule, signatures, self.device)
        step = _Step(self, p2p, schedule, batches, signatures, executor, training)
        if training:
            self.most_held = self.most_deferred = 0
            self.stopwatch.begin(schedule)
        run_actions(with_transfers(schedule)[self.axis.rank], step)
        p2p.finish()
        return [step.losses[m] for m in sorted(step.losses)]

    @contextmanager
    def naming(self, action: Action) -> Iterator[None]:
        """Add stage, rank and action to errors raised inside, except for an uncut model."""
        if self.staged.is_whole:
            yield
            return
        try:
            yield
        except Exception as error:
            place = f"stage {self.axis.rank} (rank {dist.get_rank()}), {action}: {action.in_words}"
            if isinstance(error, LauncherError):
                error.where = f"{error.where}, {place}" if error.where else place
            else:
                error.add_note(place)
            raise


class _Step:
    """The state of one step, and its actions (`StageActions`).

    Attributes:
        kept: forwards whose backward is pending.
        arrived: inputs of pending forwards.
        gradients: gradients of the outputs of forwards.
        deferred: deferred weight gradients.
        leaving: tensors to be sent.
        versions: weight version of each microbatch (`StageExecutor.see`); None: always the newest.
    """

    def __init__(
        self,
        runtime: Runtime,
        p2p: StageP2P,
        schedule: PipelineSchedule,
        batches: Sequence[Any],
        signatures: Sequence[Signature],
        executor: StageExecutor,
        training: bool,
    ) -> None:
        self.runtime, self.staged, self.rank, self.p2p = runtime, runtime.staged, runtime.axis.rank, p2p
        self.batches, self.signatures, self.executor, self.training = batches, signatures, executor, training
        self.kept: dict[MicrobatchKey, SavedForward] = {}
        self.arrived: dict[MicrobatchKey, tuple[Tensor, ...]] = {}
        self.gradients: dict[MicrobatchKey, tuple[Tensor, ...]] = {}
        self.deferred: dict[MicrobatchKey, DeferredWeightGrads] = {}
        self.leaving: dict[Action, tuple[tuple[Tensor, ...], StageBoundary | None]] = {}
        self.losses: dict[int, Tensor] = {}
        self.versions = _versions(schedule, self.rank) if training and not schedule.flushes else None

    # ---- actions ----------------------------------------------------------------------------

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        runtime = self.runtime
        with runtime.naming(action), runtime.stopwatch.action(action) if self.training else nullcontext():
            yield
        runtime.most_held = max(runtime.most_held, len(self.kept))
        runtime.most_deferred = max(runtime.most_deferred, len(self.deferred))

    def receive(self, action: Action) -> None:
        into = self.arrived if action.kind is ActionKind.RECV_F else self.gradients
        into[action.stage, action.microbatch] = self.p2p.receive(action)

    def send(self, action: Action) -> None:
        self.p2p.send(action, *self.leaving.pop(action))

    def forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        self._see(microbatch)
        received, leaves = _started(self.arrived.pop((stage, microbatch), ()))
        signature, batch = self.signatures[microbatch], self.batches[microbatch]
        is_last = stage == self.staged.virtual_stages - 1
        new = not is_last and self.staged.learned(stage, signature) is None
        output = self.staged.forward(
            stage, received, signature, lambda module: self.executor.forward(module, batch)
        )
        if is_last:
            loss = self.executor.loss(output)
            self.losses[microbatch] = loss.detach()
            outputs: tuple[Tensor, ...] = (loss,)
        else:
            outputs = output
            self._hand_on(stage, microbatch, outputs, new)
        if self.training:
            self.kept[stage, microbatch] = SavedForward(leaves, _ends(outputs))

    def _hand_on(self, stage: int, microbatch: int, outputs: tuple[Tensor, ...], new: bool) -> None:
        tensors = tuple(output.detach().contiguous() for output in outputs)
        if self.staged.rank_of[stage + 1] == self.rank:
            self.arrived[stage + 1, microbatch] = tensors
            return
        learned = self.staged.learned(stage, self.signatures[microbatch]) if new else None
        self.leaving[Action(ActionKind.SEND_F, stage, microbatch)] = tensors, learned

    def backward(self, action: Action, *, last: bool) -> None:
        stage, microbatch = action.stage, action.microbatch
        self._see(microbatch)
        kept = self.kept.pop((stage, microbatch))
        if stage == self.staged.virtual_stages - 1:
            factor = self.executor.root_gradient(microbatch)
            gradients: tuple[Tensor, ...] = (torch.full_like(self.losses[microbatch], factor),)
        else:
            gradients = self.gradients.pop((stage, microbatch))
        pairs = [(out, grad) for out, grad in zip(kept.outputs, gradients, strict=True) if out is not None]
        self.staged.before_backward(stage, self.signatures[microbatch])
        self.executor.backward(stage, [out for out, _ in pairs], [grad for _, grad in pairs], last=last)
        if stage == 0:
            return
        back = tuple(_gradient_of(leaf) for leaf in kept.received)
        if self.staged.rank_of[stage - 1] == self.rank:
            self.gradients[stage - 1, microbatch] = back
        else:
            self.leaving[Action(ActionKind.SEND_B, stage, microbatch)] = back, None

    def input_backward(self, action: Action) -> None:
        with putting_off() as self.deferred[action.stage, action.microbatch]:
            self.backward(action, last=False)

    def weight_backward(self, action: Action, *, last: bool) -> None:
        self.executor.finish(self.deferred.pop((action.stage, action.microbatch)), last=last)

    def update(self, action: Action) -> None:
        assert self.versions is not None
        self.executor.update({self.versions[microbatch] for _, microbatch in self.kept})

    def _see(self, microbatch: int) -> None:
        """Select the weights of this microbatch for the next forward or backward."""
        if self.versions is not None:
            self.executor.see(self.versions[microbatch])


class _Start(torch.autograd.Function):
    """Returns a received tensor whose gradient goes to a leaf of the same shape that takes no memory."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _started(arrived: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return (the received tensors as inputs for autograd, the leaves that get the gradients of the
    floating-point tensors among them)."""
    received, leaves = [], []
    for tensor in arrived:
        if tensor.is_floating_point():
            leaves.append(tensor.new_zeros(()).expand(tensor.shape).requires_grad_())
            tensor = _Start.apply(leaves[-1], tensor)
        received.append(tensor)
    return tuple(received), tuple(leaves)


def _ends(outputs: tuple[Tensor, ...]) -> tuple[GradientEdge | None, ...]:
    floats = [output for output in outputs if output.is_floating_point()]
    return tuple(get_gradient_edge(output) if output.requires_grad else None for output in floats)


def _gradient_of(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    return leaf.new_zeros(leaf.shape) if gradient is None else gradient.contiguous()


def _versions(schedule: PipelineSchedule, rank: int) -> list[int]:
    """Return the weight version of each microbatch, in updates since the start of any step but the first."""
    from launcher.pipeline.schedules.asynchronous import weights_used

    return [updates - (schedule.delay or 0) for updates in weights_used(schedule)[rank]]


def _forwards(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return a schedule reduced to its forwards, in order."""
    actions = tuple(tuple(a for a in of_rank if a.kind is ActionKind.FORWARD) for of_rank in schedule.actions)
    return replace(schedule, actions=actions)
