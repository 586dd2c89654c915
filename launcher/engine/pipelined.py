"""An optimizer step of an engine whose model is cut into stages: its microbatches go through `pipeline/executor/`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from launcher.comm import broadcast
from launcher.engine.batches import call, cast, loss_in, outputs_in, to_device
from launcher.errors import ConfigError
from launcher.pipeline.executor.batches import share
from launcher.tensor.head import loss_only
from launcher.tensor.weight_gradients import DeferredWeightGrads, GradientBuffer, adding_in

if TYPE_CHECKING:
    from launcher.engine.engine import Engine


class EngineExecutor:
    """What the runtime asks of an engine in one step.

    Args:
        weights: of each microbatch in the loss; they add up to 1.
        outputs: gets what the last stage returns for each microbatch; None: nobody wants it.
        with_loss: false: there is none.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Sequence[float],
        outputs: list[Any] | None = None,
        *,
        with_loss: bool = True,
    ) -> None:
        self.engine, self.weights, self.outputs, self.with_loss = engine, weights, outputs, with_loss
        self.updates_inside = engine.resolved.pipeline.updates_inside
        self.first = 0 if engine.versions is None else engine.versions.newest

    def forward(self, module: nn.Module, batch: Any) -> Any:
        engine = self.engine
        if engine.resolved.fp16.enabled and engine.resolved.fp16.auto_cast:
            batch = cast(batch, torch.float16)
        logits = loss_only() if self.outputs is None else nullcontext()
        with engine.watch.phase("forward", engine), engine._autocasting(), logits:
            return call(module, batch)

    def loss(self, output: Any) -> Tensor:
        if self.outputs is not None:
            self.outputs.append(outputs_in(output))
        if not self.with_loss:
            return torch.zeros((), device=self.engine.device)
        if isinstance(output, dict) and output.get("loss") is None:
            raise ConfigError(
                "the last stage returns no loss",
                where="engine.train_batch()",
                fix="give labels with every batch, and a PipelineModule its loss_fn, or let its last layer return the "
                "loss, one number",
            )
        return loss_in(output).reshape(())

    def root_gradient(self, microbatch: int) -> float:
        """Where each microbatch makes an update of its own, it is a batch of its own: weights are 1 on the average."""
        updates = len(self.weights) if self.updates_inside else 1
        return self.weights[microbatch] * updates * self.engine.loss_scaler.scale

    def backward(self, outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], *, last: bool) -> None:
        place = self._begin_backward(last)
        if not outputs:
            self.engine.zero.reducer.sync = False  # nothing is reduced here: `_flush_gradients` does it
            return
        with self.engine.watch.phase("backward", self.engine), adding_in(place):
            torch.autograd.backward(outputs, gradients)

    def finish(self, put_off: DeferredWeightGrads, *, last: bool) -> None:
        place = self._begin_backward(last)
        with self.engine.watch.phase("backward", self.engine):
            leaves, gradients = put_off.computed(place)
            if leaves:
                torch.autograd.backward(leaves, gradients)

    def _begin_backward(self, last: bool) -> GradientBuffer | None:
        """Where gradients of weights are added up in this backward: nowhere if it is to reduce them."""
        reducer, section = self.engine.zero.reducer, self.engine.resolved.pipeline
        each = section.reduce_per_microbatch or self.updates_inside
        reducer.sync = each or (last and section.chunks_of_rank == 1)
        reducer.boundary = last or self.updates_inside
        return None if reducer.sync else self.engine.zero.place_of_gradient

    def see(self, version: int) -> None:
        assert self.engine.versions is not None
        self.engine.versions.show(self.first + version)

    def update(self, needed: Collection[int]) -> None:
        engine = self.engine
        _flush_gradients(engine)
        with engine.watch.phase("step", engine):
            engine.step_weights({self.first + version for version in needed})
            engine.zero.zero_grad()


def train(
    engine: Engine, batches: Sequence[Any], weights: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Forward and backward of all microbatches of a step; the optimizer has not stepped.

    Args:
        batches, weights: those of the first stage are taken.

    Returns:
        the loss of each microbatch and its weight, on all ranks.
    """
    assert engine.runtime is not None
    batches, weights = _shared(engine, batches, weights, training=True)
    with _gathering(engine):
        try:
            losses = engine.runtime.run(batches, EngineExecutor(engine, weights), training=True)
            _flush_gradients(engine)
        finally:
            engine.zero.reducer.sync = True
            if engine.versions is not None:
                engine.versions.show(engine.versions.newest)
    return _told(engine, losses, len(batches)), weights


@torch.no_grad()
def evaluate(
    engine: Engine,
    batches: Sequence[Any],
    weights: Sequence[float] = (),
    outputs: list[Any] | None = None,
    *,
    with_loss: bool = True,
) -> tuple[list[float], list[float]]:
    """As `train`, without gradients; losses are zeros without `with_loss`.

    Args:
        outputs: gets what the model returns for each, its logits where it has such, on the ranks of the last stage.
    """
    assert engine.runtime is not None
    batches, weights = _shared(engine, batches, weights, training=False)
    with _gathering(engine):
        losses = engine.runtime.run(
            batches, EngineExecutor(engine, weights, outputs, with_loss=with_loss), training=False
        )
    return _told(engine, losses, len(batches)), weights


def weighted(losses: Sequence[float], weights: Sequence[float]) -> float:
    """The sum of weight x loss. A microbatch of weight 0 has no token to learn, and a loss that is no number."""
    return math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)


def _shared(
    engine: Engine, batches: Sequence[Any], weights: Sequence[float], *, training: bool
) -> tuple[list[Any], list[float]]:
    """Those of the first stage, on all. Its tp ranks have read them, each by itself."""
    mine = [to_device(batch, engine.device) for batch in batches], list(weights)
    shared: tuple[list[Any], list[float]] = share(mine, engine.mesh.axes["pp"], engine.device)
    engine.inputs.look(shared, training=training)
    return shared


def _flush_gradients(engine: Engine) -> None:
    """Reduce what the last backward has not."""
    reducer = engine.zero.reducer
    if not reducer.sync:
        reducer.boundary = True
        reducer.flush()
        reducer.sync = True


def _gathering(engine: Engine) -> AbstractContextManager[Any]:
    """Parameters of ZeRO-3 are gathered once a step, unless the JSON says once a microbatch."""
    return nullcontext() if engine.resolved.pipeline.gather_per_microbatch else engine.zero.fetcher.keeping()


def _told(engine: Engine, losses: list[Tensor], number: int) -> list[float]:
    """What the last stage knows, on all."""
    assert engine.runtime is not None
    pp, last = engine.mesh.axes["pp"], engine.runtime.staged.rank_of[-1]
    found = torch.zeros(number, dtype=torch.float64, device=engine.device)
    if losses:
        found.copy_(torch.stack([loss.double() for loss in losses]))
    broadcast(found, pp, "root/loss", source=last).wait()
    told: list[float] = found.tolist()
    return told
