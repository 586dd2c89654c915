"""Runs the microbatches of a step or an evaluation through `pipeline/executor/`, in one stage or several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from launcher.comm import broadcast
from launcher.engine.batches import call, loss_in, outputs_in, to_device
from launcher.engine.finite import can_step_in_backward
from launcher.engine.gradient_plan import flush
from launcher.errors import ConfigError, MisplacedCallError
from launcher.pipeline.executor.batches import share
from launcher.tensor.split_model import loss_only
from launcher.tensor.weight_gradients import DeferredWeightGrads, GradientBuffer, adding_in
from launcher.zero.reduce import BackwardPlan

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore
    from launcher.optim.in_backward import OptimizerInBackward


class EngineExecutor:
    """Executes the actions of one step on an engine (`StageExecutor`).

    Args:
        weights: the weight of each microbatch in the loss; they sum to 1.
        outputs: collects the outputs of the last stage for each microbatch; None if they are not needed.
        with_loss: False if no loss is computed.
    """

    def __init__(
        self,
        engine: EngineCore,
        weights: Sequence[float] = (),
        outputs: list[Any] | None = None,
        *,
        with_loss: bool = True,
    ) -> None:
        self.engine, self.weights, self.outputs, self.with_loss = engine, weights, outputs, with_loss
        self.plan = engine.gradient_plan
        self.first = 0 if engine.versions is None else engine.versions.newest

    def forward(self, module: nn.Module, batch: Any) -> Any:
        if self.engine.runtime.staged.is_whole:
            module = self.engine.module  # scripts may have wrapped the model
        logits = loss_only() if self.outputs is None else nullcontext()
        with logits:
            return call(partial(self.engine.run_module, module), to_device(batch, self.engine.device))

    def loss(self, output: Any) -> Tensor:
        if self.outputs is not None:
            self.outputs.append(outputs_in(output))
        if not self.with_loss:
            return torch.zeros((), device=self.engine.device)
        if isinstance(output, dict) and output.get("loss") is None:
            raise ConfigError(
                "the model returns no loss",
                where="engine.train_batch()",
                fix="pass labels in every batch; for a PipelineModule pass a loss_fn, or return a "
                "scalar loss from its last layer",
            )
        loss = loss_in(output)
        if loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}"
            raise ConfigError(
                f"the model returns {what} in place of a scalar loss",
                where="engine.train_batch()",
                fix="return the loss, or a dict with a loss, from the model; for a PipelineModule pass "
                "a loss_fn",
            )
        loss = loss.reshape(())
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise MisplacedCallError(
                "the loss does not depend on any trainable parameter",
                where="engine.train_batch()",
                fix="set requires_grad on the parameters to train, and compute the loss without detach()",
            )
        return loss

    def root_gradient(self, microbatch: int) -> float:
        """Return the initial gradient of a loss. If each microbatch makes an update, weights average 1."""
        updates = len(self.weights) if self.plan.updates_inside else 1
        return self.weights[microbatch] * updates * self.engine.loss_scaler.scale

    def backward(
        self, stage: int, outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], *, last: bool
    ) -> None:
        place = self._begin_backward(self.engine.runtime.staged.names_of(stage), last)
        if not outputs:  # nothing before this stage is trained: `flush` reduces the existing gradients
            self.engine.zero.reducer.plan = BackwardPlan(reduces=False, last=last)
            return
        with self.engine.telemetry.phase("backward", self.engine), adding_in(place):
            torch.autograd.backward(outputs, gradients)

    def finish(self, put_off: DeferredWeightGrads, *, last: bool) -> None:
        place = self._begin_backward((), last)
        with self.engine.telemetry.phase("backward", self.engine):
            leaves, gradients = put_off.computed(place)
            if leaves:
                with self.engine.zero.shaped(leaves):
                    torch.autograd.backward(leaves, gradients)

    def _begin_backward(self, blocks: Collection[str] | None, last: bool) -> GradientBuffer | None:
        """Begin a backward; return the buffer that accumulates weight gradients, or None if this backward
        reduces them.

        Args:
            blocks: see `GradientPlan.begin_backward`.
        """
        zero = self.engine.zero
        listener = listener_of(self.engine) if last else None
        self.plan.begin_backward(zero.reducer, blocks, last=last, listener=listener)
        return None if zero.reducer.plan.reduces else zero.place_of_gradient

    def see(self, version: int) -> None:
        assert self.engine.versions is not None
        self.engine.versions.show(self.first + version)

    def update(self, needed: Collection[int]) -> None:
        engine = self.engine
        flush(engine.zero.reducer)
        with engine.telemetry.phase("step", engine):
            engine.wait_for_copies()
            engine.step_weights({self.first + version for version in needed})
            engine.zero.zero_grad()


def train(
    engine: EngineCore, batches: Sequence[Any], weights: Sequence[float]
) -> tuple[Tensor, Sequence[float]]:
    """Run forward and backward of all microbatches of a step, without the optimizer step.

    Args:
        batches, weights: only used on the first stage.

    Returns:
        fp64 [microbatches] losses, and their weights, on all ranks.
    """
    batches, weights = _shared(engine, batches, weights, training=True)
    try:
        with engine.gradient_plan.of_step(engine.zero.unsharder, engine.zero.reducer):
            losses = engine.runtime.run(batches, EngineExecutor(engine, weights), training=True)
    finally:
        if engine.versions is not None:
            engine.versions.show(engine.versions.newest)
    return _agreed(engine, losses, len(batches)), weights


@torch.no_grad()
def evaluate(
    engine: EngineCore,
    batches: Sequence[Any],
    weights: Sequence[float] = (),
    outputs: list[Any] | None = None,
    *,
    with_loss: bool = True,
) -> tuple[Tensor, Sequence[float]]:
    """Run the forwards of microbatches without gradients.

    Args:
        batches, weights: only used on the first stage.
        outputs: collects the logits of each microbatch, or the model output without logits, on the last
            stage.
        with_loss: False returns zeros as losses.

    Returns:
        fp64 [microbatches] losses, and their weights, on all ranks.
    """
    engine._check_usable("engine.eval_batch()")
    batches, weights = _shared(engine, batches, weights, training=False)
    with engine.gradient_plan.gathering(engine.zero.unsharder):
        work = EngineExecutor(engine, weights, outputs, with_loss=with_loss)
        losses = engine.runtime.run(batches, work, training=False)
    return _agreed(engine, losses, len(batches)), weights


def weighted(losses: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the sum of weight x loss, fp64 []. Skip weight 0: without tokens, the loss is NaN."""
    kept = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    return torch.stack([loss * weight for loss, weight in kept]).sum() if kept else losses.new_zeros(())


def listener_of(engine: EngineCore) -> OptimizerInBackward | None:
    """Return the optimizer that steps in the last backward; None if the step needs all gradients first."""
    optimizer = engine.optimizer
    if optimizer is None or not can_step_in_backward(engine):
        return None
    from launcher.optim.in_backward import OptimizerInBackward

    return OptimizerInBackward(optimizer, lambda: 1 / engine.gradient_divisor())


def _shared(
    engine: EngineCore, batches: Sequence[Any], weights: Sequence[float], *, training: bool
) -> tuple[Sequence[Any], Sequence[float]]:
    """Return the first stage's batches on all ranks. Each tp rank of the first stage reads its own copy."""
    if engine.runtime.staged.is_whole:  # a single stage, and hooks of the model check its inputs
        return batches, weights
    mine = [to_device(batch, engine.device) for batch in batches], list(weights)
    shared: tuple[list[Any], list[float]] = share(mine, engine.mesh.axes["pp"], engine.device)
    engine.inputs.look(shared, training=training)
    return shared


def _agreed(engine: EngineCore, losses: Sequence[Tensor], number: int) -> Tensor:
    """Broadcast the losses of the last stage to all stages: fp64 [number]."""
    found = torch.zeros(number, dtype=torch.float64, device=engine.device)
    if losses:
        found.copy_(torch.stack([loss.double() for loss in losses]))
    broadcast(found, engine.mesh.axes["pp"], "root/loss", source=engine.runtime.staged.rank_of[-1]).wait()
    return found
