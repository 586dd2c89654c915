"""The core of an engine: forward, backward and step of a microbatch, and the microbatch loop of a step.

[Note: Two ways to a step]
A script may run each microbatch itself: `loss = engine(batch); engine.backward(loss); engine.step()`. Or the
engine runs all of them: `run_microbatches()`, then `step()`, as `train_batch()`, the recipes and models in
stages do. Both pass a `BackwardPlan` for the next backward to the reducer before it begins, and both end in
`_optimizer_step`. Only the second way has all microbatches of the step, so only it can run the optimizer
during the last backward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from launcher.comm import Mesh
from launcher.config import Config
from launcher.engine import executor
from launcher.engine.accumulation import AccumulationMixin
from launcher.engine.batches import cast
from launcher.engine.bit_checks import BitChecks
from launcher.engine.clipping import Clipping
from launcher.engine.curriculum import Curriculum
from launcher.engine.dtypes import autocast_dtype
from launcher.engine.engine_getters import EngineGetters, ModuleHolder
from launcher.engine.finite import skips_overflow, tell_overflow
from launcher.engine.gradient_plan import GradientPlan
from launcher.engine.nonfinite_tracer import NonFiniteTracer
from launcher.engine.same_inputs import SameInputs
from launcher.engine.state_offload import StateOffloadMixin
from launcher.engine.telemetry import Telemetry
from launcher.errors import ConfigError, LauncherError, MisplacedCallError
from launcher.optim.loss_scale import LossScale
from launcher.optim.sharded import ShardedOptimizer
from launcher.pipeline.executor.batches import LazySequence
from launcher.pipeline.executor.runtime import Runtime
from launcher.zero import ZeroModel
from launcher.zero.features.overflow import watch_gradients
from launcher.zero.reduce import BackwardPlan

if TYPE_CHECKING:
    from launcher.checkpoint.saver import Saver
    from launcher.zero.features.versions import Versions


class EngineCore(AccumulationMixin, StateOffloadMixin, EngineGetters, ModuleHolder):
    """The core of the engine: a model in flat buffers, its optimizer, step counters, and telemetry.

    `Engine` (`engine.py`) is the public subclass. The mixins add gradient accumulation (`accumulation.py`),
    states that a script moves to the host (`state_offload.py`), and getters.

    Attributes:
        module: the user's model.
        runtime: runs the microbatches of a step; a model without pipeline parallelism is a single stage.
        optimizer: steps this rank's slices; its `param_groups` are live. None without an optimizer.
        lr_scheduler: stepped after each optimizer step. None without a scheduler.
        global_steps, global_samples, micro_steps, skipped_steps: counters.
    """

    quiet = False  # set by training loops that print their own progress line

    def __init__(
        self,
        zero: ZeroModel,
        config: Config,
        mesh: Mesh,
        runtime: Runtime,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        telemetry: Telemetry,
        versions: Versions | None,
        inputs: SameInputs,
    ) -> None:
        super().__init__()
        self.module = zero.module
        self.zero, self.mesh, self._config, self.runtime = zero, mesh, config, runtime
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.telemetry, self.versions = telemetry, versions
        self.monitor, self.timers = telemetry.monitor, telemetry.timers
        self.gradient_plan = GradientPlan.of(config.pipeline, is_whole=runtime.staged.is_whole)
        self._autocast = autocast_dtype(config)
        self.loss_scaler = LossScale.of(config.fp16, autocast=self._autocast is torch.float16)
        self.inputs = inputs
        if runtime.staged.is_whole and self.inputs.active:  # also for scripts that call the module directly
            zero.hooks.add_removable(self.inputs.follow(self.module))
        self._saver: Saver | None = None
        self.curriculum = Curriculum.of(config.data_efficiency)
        self.clipping = Clipping(float(config.gradient_clipping))
        self.bit_checks = BitChecks(config.replica_check)
        self.nonfinite_tracer = NonFiniteTracer()
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._backwards = 0  # in this step
        self._norm: float | None = None
        self._applied = False
        self._destroyed = False

    # ---- one microbatch ---------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_stages("engine(...)")
        self._check_usable("engine(...)")
        self._set_backward_plan()
        if self.module.training and self.curriculum.metric is not None:
            args, kwargs = self.curriculum.cut((args, kwargs), self.global_steps)
        return self.run_module(self.module, *args, **kwargs)

    def run_module(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the model, or this rank's stage of it, with the configured precision and timers."""
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = cast(args, torch.float16), cast(kwargs, torch.float16)
        if self.nonfinite_tracer.looks and self.runtime.staged.is_whole and torch.is_grad_enabled():
            self.nonfinite_tracer.inputs = args, kwargs
        with self.telemetry.phase("forward", self), self.autocasting():
            return module(*args, **kwargs)

    def autocasting(self) -> AbstractContextManager[Any]:
        """Return the context of a forward: torch.autocast if configured."""
        return torch.autocast(self.device.type, self._autocast) if self._autocast else nullcontext()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run the backward of one microbatch.

        Args:
            loss: scalar, the mean over the microbatch.
            retain_graph: as in Tensor.backward.
            scale_wrt_gas: divide by gradient_accumulation_steps; False if the caller has already weighted the
                loss.

        Returns:
            The detached loss, divided as for the backward, without the loss scale.
        """
        self._refuse_stages("engine.backward()")
        if loss is None:
            raise MisplacedCallError(
                "engine.backward() received None: the model returned no loss",
                where="engine.backward()",
                fix="call the model with labels; a loader that splits sequences (sp_size) provides "
                "only shift_labels: compute the loss with model.loss_function(logits, None, "
                "vocab_size, shift_labels=shift_labels)",
            )
        if self._config.loss_normalization == "tokens":
            from launcher.engine.token_weights import check_backward

            check_backward(loss)
        self._set_backward_plan()
        self._backwards += 1
        divided = self._divided(loss, scale_wrt_gas)
        self.telemetry.loss(loss, 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0)
        with self.telemetry.phase("backward", self), self.zero.hooks.scaling():
            self._scaled(divided).backward(retain_graph=retain_graph)
        return divided.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, divided by the accumulation steps.

        `engine.scale(loss).backward()` gives the same gradients as `engine.backward(loss)`.

        Raises:
            MisplacedCallError: the loss is not a scalar, or has no graph to the parameters.
        """
        if loss.numel() != 1 or loss.grad_fn is None:
            raise MisplacedCallError(
                "a loss must be a scalar tensor computed from parameters, not a tensor of shape "
                f"{tuple(loss.shape)} {'without' if loss.grad_fn is None else 'with'} a grad_fn",
                where="engine.scale()",
                fix="pass the loss; for other tensors use tensor.backward(gradient)",
            )
        scaled = self._scaled(self._divided(loss))
        scaled = scaled.clone() if scaled is loss else scaled  # do not leave the hook on the caller's tensor
        scaled.register_hook(self._begin_scaled)
        return scaled

    def _begin_scaled(self, gradient: Tensor) -> None:
        self._backwards += 1
        self.zero.hooks.begin_scaled(gradient)

    def _divided(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        steps = self.gradient_accumulation_steps()
        return loss / steps if scale_wrt_gas and steps > 1 else loss

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scaler.scale == 1 else loss * self.loss_scaler.scale

    def _set_backward_plan(self) -> None:
        """Set the reducer's plan for the next backward; in forward, too, as scripts may call `loss.backward()`."""
        self.zero.reducer.plan = BackwardPlan(self._syncs, self.is_gradient_accumulation_boundary())
        self._record_overflows_at_floor()

    def _record_overflows_at_floor(self) -> None:
        """At the minimum loss scale, record which gradients overflow, for the error message."""
        if self.loss_scaler.dynamic:
            watch_gradients(self.zero, self.loss_scaler.at_floor)

    # ---- the microbatches of a step ---------------------------------------------------------

    def run_microbatches(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        """Run forward and backward of all microbatches of a step, through all stages; `step()` comes next.

        Args:
            batches: only read on ranks of the first stage, like the weights.
            weights: the weight of each microbatch in the loss; multiplies its gradient.

        Returns:
            the sum of weight x loss over the microbatches, on all stages; those of weight 0 do not count.
        """
        return float(self.train_microbatches(batches, weights))

    def train_microbatches(self, batches: Sequence[Any], weights: Sequence[float]) -> Tensor:
        """Do `run_microbatches`, but return a 0-dim float64 tensor, without synchronizing with the device."""
        self._check_usable("engine.train_batch()")
        self.check_whole_step()
        if self.mesh.axes["pp"].rank == 0 and len(batches) != len(weights):
            raise ConfigError(
                f"{len(batches)} microbatches but {len(weights)} weights",
                where="engine.run_microbatches()",
                fix="pass one weight per microbatch; 1 / number of microbatches gives the mean of "
                "their losses",
            )
        steps = self.global_steps
        cut = LazySequence(len(batches), lambda m: self.curriculum.cut(batches[m], steps))
        self._record_overflows_at_floor()
        try:
            with self.zero.hooks.scaling():
                losses, weights = self.bit_checks.microbatches(
                    self, cut, lambda microbatches: executor.train(self, microbatches, weights)
                )
        except StopIteration:  # the data ended within the step: discard its gradients
            self.abandon_step()
            raise
        loss = executor.weighted(losses, weights)
        self.telemetry.loss(loss, 1.0)
        self._backwards += len(losses)
        self._microbatches = self.gradient_accumulation_steps() - 1  # whatever their number: step() is due
        self.micro_steps += len(losses) - 1
        return loss

    @torch.no_grad()
    def eval_microbatches(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        """Do the same as `run_microbatches`, without gradients."""
        return float(executor.weighted(*executor.evaluate(self, batches, weights)))

    # ---- the optimizer step -----------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Step at the accumulation boundary: norm, overflow check, clipping, optimizer, schedule.

        Between boundaries this only counts. With `managed_gradient_accumulation: false` every call is a
        boundary.
        """
        if self._backwards == 0:
            self._refuse_stages("engine.step()")  # valid only after run_microbatches
        if self._away:
            self.check_states_are_here("engine.step()")
        boundary = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        if boundary and not self._syncs:
            raise MisplacedCallError(
                "It is illegal to call Engine.step() inside no_sync context manager, at an accumulation boundary",
                fix="call it outside no_sync()",
            )
        self._applied = False
        if boundary:
            with self.telemetry.phase("step", self):
                self.wait_for_copies()
                for call in self.zero.callbacks.before_step:
                    call()
                self.zero.reducer.flush()
                self._optimizer_step(lr_kwargs or {})
                if self._config.replica_check.resting:
                    self.bit_checks.after_step(self)
            self.telemetry.after_step(self)
        self._microbatches = 0 if boundary else self._microbatches + 1
        self.micro_steps += 1

    def step_without_schedule(self) -> None:
        """Do `step()` for a script that calls optimizer.step(), and therefore steps the schedule itself."""
        schedule, self.lr_scheduler = self.lr_scheduler, None
        try:
            self.step()
        finally:
            self.lr_scheduler = schedule

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        if self.gradient_plan.updates_inside:  # each microbatch has already updated the weights
            overflow = False
        else:
            overflow = self.step_weights(() if self.versions is None else {self.versions.newest})
        if not overflow and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.zero.zero_grad()
        self.nonfinite_tracer.inputs = None
        if self.loss_scaler.dynamic:
            self.loss_scaler.update(overflow)
        self._count(overflow)
        if self._saver is not None:
            self._saver.raise_failure()

    def wait_for_copies(self) -> None:
        """Wait until a background save has copied the state that the step will change."""
        if self._saver is not None:
            self._saver.let_change()

    def step_weights(self, needed: Collection[int] = ()) -> bool:
        """Run norm, overflow check, clipping and optimizer; return whether the step was skipped due to an
        overflow.

        Args:
            needed: with an asynchronous schedule, the weight versions that are still needed.
        """
        if self.optimizer is None:
            raise ConfigError(
                "the engine has no optimizer",
                where="optimizer",
                fix="add it to the JSON, or pass initialize(optimizer=...)",
            )
        norm = self.clipping.grad_norm(self)
        overflow = not math.isfinite(norm) and skips_overflow(self._config)
        self._norm = (math.inf if overflow else norm) if self.zero.policy.compute_norm else None
        if overflow:
            tell_overflow(self)
        if not math.isfinite(norm) and not (
            overflow and (self.loss_scaler.dynamic or self.bfloat16_enabled())
        ):
            self.nonfinite_tracer.tell(self, skipped=overflow)
        self.optimizer.overflow = overflow
        if self._bits_are_due():
            self.bit_checks.before_step(self)
        if self.versions is not None:
            self.versions.advance(needed)
        if not overflow:
            self.optimizer.step_scaled(self.clipping.take_coefficient(norm) / self.gradient_divisor())
        return overflow

    def _bits_are_due(self) -> bool:
        """Return whether `replica_check` applies to this step."""
        section, number = self._config.replica_check, self.global_steps + 1
        return section.resting or any(n and number % n == 0 for n in (section.every, section.replay_every))

    def _count(self, overflow: bool) -> None:
        self._applied = not overflow
        self.skipped_steps += overflow
        self.global_steps += 1
        samples = self.samples_of_step()
        self.global_samples += samples
        self._backwards = 0
        self.telemetry.counted(self, samples)

    def abandon_step(self) -> None:
        """Discard the microbatches since the last optimizer step."""
        if self.optimizer is not None:
            self.optimizer.forget_in_backward()
        self.zero.zero_grad()
        self.telemetry.forget()
        self.nonfinite_tracer.inputs = None
        self._microbatches = self._backwards = 0

    @property
    def made_saver(self) -> Saver | None:
        """Return the saver if anything was saved or loaded, else None."""
        return self._saver

    @property
    def saver(self) -> Saver:
        """Return the saver, which writes and reads checkpoints; created on first use."""
        if self._saver is None:
            from launcher.checkpoint.saver import Saver

            self._saver = Saver(self._config.checkpoint, self.mesh.rank)
        return self._saver

    # ---- validation --------------------------------------------------------------------

    def _refuse_stages(self, what: str) -> None:
        if not self.runtime.staged.is_whole:
            raise ConfigError(
                f"{what} runs one microbatch on one rank, but the model is split into "
                f"{self.mesh.axes['pp'].degree} pipeline stages",
                where="pipeline.stages",
                fix="call engine.train_batch(data_iter) or engine.eval_batch(data_iter)",
            )

    def _check_usable(self, where: str) -> None:
        if self._destroyed:
            raise LauncherError(
                "this engine has been destroyed: its model no longer belongs to an engine",
                where=where,
                fix="call initialize() again; after evaluating under ZeRO-3, a Hugging Face Trainer "
                "destroys its engine before training: train with another Trainer, or evaluate "
                "afterwards",
            )
        if self._away:
            self.check_states_are_here(where)
