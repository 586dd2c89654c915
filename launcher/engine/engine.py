"""The engine: DeepSpeed's surface over the packages below. What each call does is in the DeepSpeed documentation;
where ours differs, the docstring says so."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from launcher.checkpoint.saver import Saver
from launcher.comm import Mesh, all_reduce
from launcher.config import Config
from launcher.engine import pipelined
from launcher.engine.batches import call, cast, loss_in, to_device
from launcher.engine.clipping import Clipping, follow_clipping
from launcher.engine.curriculum import Curriculum
from launcher.engine.data import DataMixin
from launcher.engine.deepspeed_methods import DeepSpeedMethods
from launcher.engine.describe import state_lines
from launcher.engine.dtypes import autocast_dtype
from launcher.engine.evaluating import losses_and_outputs, reduced
from launcher.engine.finite import (
    can_step_in_backward,
    check_scales,
    skips_overflow,
    tell_overflow,
)
from launcher.engine.fragments import ENGINES
from launcher.engine.nonfinite_tracer import NonFiniteTracer
from launcher.engine.python_gc import hold
from launcher.engine.queries import EngineGetters
from launcher.engine.same_inputs import SameInputs
from launcher.engine.saving import CheckpointMixin
from launcher.engine.state_offload import StateOffloadMixin
from launcher.engine.telemetry import Telemetry
from launcher.errors import ConfigError, LauncherError, MisplacedCallError
from launcher.models.activation import Checkpointer
from launcher.models.compiled import compile_blocks
from launcher.monitor.log import set_level
from launcher.monitor.writers import Monitor
from launcher.optim.in_backward import OptimizerInBackward
from launcher.optim.loss_scale import LossScale
from launcher.optim.sharded import ShardedOptimizer
from launcher.pipeline.runtime import Runtime
from launcher.tensor.head import loss_only
from launcher.zero import ZeroModel
from launcher.zero.features.overflow import watch_gradients
from launcher.zero.features.versions import Versions


class Engine(EngineGetters, DataMixin, CheckpointMixin, StateOffloadMixin, DeepSpeedMethods, nn.Module):
    """A model in training. Made by `launcher.initialize`.

    The loop is `loss = engine(batch); engine.backward(loss); engine.step()` for every microbatch; the real step
    happens at the accumulation boundary.

    Attributes:
        module: the user's model.
        monitor: its `write_events([(name, value, samples), ...])` reaches the monitors of the JSON.
        optimizer: steps this rank's slices; its `param_groups` are live. None when there is none.
        lr_scheduler: stepped after each optimizer step. None when there is none.
        global_steps, global_samples, micro_steps, skipped_steps: counters.
    """

    explain: ClassVar[Callable[[str], AttributeError] | None] = None
    """Makes the error of a name that neither the engine nor its model has; whoever gives it other names sets it."""

    def __init__(
        self,
        zero: ZeroModel,
        config: Config,
        mesh: Mesh,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        training_dataloader: Any = None,
        checkpointer: Checkpointer | None = None,
        monitor: Monitor | None = None,
        runtime: Runtime | None = None,
        versions: Versions | None = None,
    ) -> None:
        super().__init__()
        self.module = zero.module
        self.zero, self.mesh, self._config, self.runtime = zero, mesh, config, runtime
        self.versions = versions
        self.optimizer, self.lr_scheduler, self.training_dataloader = (
            optimizer,
            lr_scheduler,
            training_dataloader,
        )
        self.checkpointer = checkpointer
        self._autocast = autocast_dtype(config)
        self.loss_scaler = LossScale.of(config.fp16, autocast=self._autocast is torch.float16)
        self.inputs = SameInputs(mesh.axes["tp"], mesh.device)
        if runtime is None and self.inputs.active:  # also where a script calls the module itself
            zero.hooks.add_removable(self.inputs.follow(self.module))
        if optimizer is not None:
            optimizer.engine = weakref.ref(self)
        self.saver = Saver(config.checkpoint, mesh.rank)
        self.watch = Telemetry(config, mesh, monitor or Monitor(), checkpointer)
        weakref.finalize(self, self.watch.flush_on_exit)
        self.monitor, self.timers = self.watch.monitor, self.watch.timers
        self.curriculum = Curriculum.of(config.data_efficiency)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.is_compiled = False
        self.quiet = False  # a training loop with a progress line of its own sets this
        self._boundary: bool | None = None
        self._microbatches = 0  # of this step; micro_steps are no measure once the batch size has changed
        self._backwards = 0  # of this step
        self._norm: float | None = None
        self._applied = False
        self._destroyed = False
        self._step_follows = False  # inside a call that runs all microbatches of a step
        self.blame = NonFiniteTracer()
        self.clipping = Clipping(float(config.gradient_clipping))
        follow_clipping()
        self._gc = hold(self) if config.disable_python_gc else None
        set_level(config.log_level)
        ENGINES.add(self)
        if config.dump_state and mesh.rank == 0:
            print(*state_lines(self), sep="\n", flush=True)

    # ---- one microbatch ---------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_stages("engine(...)")
        if self._destroyed:
            raise LauncherError(
                "this engine has been destroyed: its model belongs to no engine now",
                where="engine(...)",
                fix="call initialize() again; a Trainer of Hugging Face's that has evaluated under ZeRO-3 destroys its "
                "engine before it trains: train with another Trainer, or evaluate afterwards",
            )
        if self._away:
            self.check_states_are_here("engine(...)")
        self._announce_boundary()
        if self.module.training and self.curriculum.metric is not None:
            args, kwargs = self.curriculum.cut((args, kwargs), self.global_steps)
        if self._config.fp16.enabled and self._config.fp16.auto_cast:
            args, kwargs = cast(args, torch.float16), cast(kwargs, torch.float16)
        self.blame.keep(args, kwargs)
        with self.watch.phase("forward", self), self._autocasting():
            return self.module(*args, **kwargs)

    def _refuse_stages(self, what: str) -> None:
        if self.runtime is not None:
            raise ConfigError(
                f"{what} is one microbatch on one rank, and the model runs in stages: {self.num_stages}",
                where="pipeline.stages",
                fix="call engine.train_batch(data_iter) or engine.eval_batch(data_iter)",
            )

    def _autocasting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self._autocast) if self._autocast else nullcontext()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of one microbatch.

        Args:
            loss: scalar, the mean over the microbatch.
            retain_graph: as in Tensor.backward.
            scale_wrt_gas: divide by gradient_accumulation_steps; false when the caller has weighted the loss.

        Returns:
            The loss, detached, divided as it was for the backward; without the loss scale.
        """
        self._refuse_stages("engine.backward()")
        self._announce_boundary()
        self._backwards += 1
        divided = self._divided(loss, scale_wrt_gas)
        self.watch.loss(loss, 1 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0)
        with self.watch.phase("backward", self), self.zero.hooks.scaling():
            self._scaled(divided).backward(retain_graph=retain_graph)
        return divided.detach()

    def _divided(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        steps = self.gradient_accumulation_steps()
        return loss / steps if scale_wrt_gas and steps > 1 else loss

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scaler.scale == 1 else loss * self.loss_scaler.scale

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, over the accumulation steps: `engine.scale(loss).backward()` gives the
        gradients of `engine.backward(loss)`.

        Raises:
            MisplacedCallError: it is no scalar, or nothing leads from it to the parameters.
        """
        if loss.numel() != 1 or loss.grad_fn is None:
            raise MisplacedCallError(
                "a loss must be a scalar tensor that was computed from parameters, not one of shape "
                f"{tuple(loss.shape)} {'without' if loss.grad_fn is None else 'with'} a grad_fn",
                where="engine.scale()",
                fix="give it the loss; for other tensors use tensor.backward(gradient)",
            )
        scaled = self._scaled(self._divided(loss))
        scaled = scaled.clone() if scaled is loss else scaled  # the hook is not to stay on the caller's own
        scaled.register_hook(self.zero.hooks.begin_scaled)
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the accumulation boundary: norm, overflow check, clipping, optimizer, schedule. Else only counts.

        With `managed_gradient_accumulation: false` every call is a boundary.
        """
        if self._backwards == 0:
            self._refuse_stages("engine.step()")  # after run_microbatches it is what comes next
        if self._away:
            self.check_states_are_here("engine.step()")
        boundary = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        if boundary and not self.zero.reducer.sync:
            raise MisplacedCallError(
                "engine.step() inside no_sync() at an accumulation boundary", fix="leave no_sync() before it"
            )
        self._applied = False
        if boundary:
            with self.watch.phase("step", self):
                for call in self.zero.callbacks.before_step:
                    call()
                self.zero.reducer.flush()
                self._optimizer_step(lr_kwargs or {})
            self.watch.after_step(self)
        self._microbatches = 0 if boundary else self._microbatches + 1
        self.micro_steps += 1

    def step_without_schedule(self) -> None:
        """`step()` for a script that calls the optimizer's: its schedule is stepped by the script, too."""
        schedule, self.lr_scheduler = self.lr_scheduler, None
        try:
            self.step()
        finally:
            self.lr_scheduler = schedule

    def _announce_boundary(self) -> None:
        self.zero.reducer.boundary = self.is_gradient_accumulation_boundary()
        optimizer = self.optimizer if self._step_follows and can_step_in_backward(self) else None
        self.zero.reducer.listener = (
            None if optimizer is None else OptimizerInBackward(optimizer, lambda: 1 / self.gradient_divisor())
        )
        if self.loss_scaler.dynamic:
            watch_gradients(self.zero, self.loss_scaler.at_floor)  # the next overflow may be the last

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        if (
            self.runtime is not None and self._config.pipeline.updates_inside
        ):  # the weights have changed, microbatch by microbatch
            overflow = False
        else:
            overflow = self.step_weights(() if self.versions is None else {self.versions.newest})
        if not overflow and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.zero.zero_grad()
        self.blame.forget()
        if self.loss_scaler.dynamic:
            self.loss_scaler.update(overflow)
        self._count(overflow)
        if self.saver.pending:
            self.saver.raise_failure()

    def step_weights(self, needed: Collection[int] = ()) -> bool:
        """Norm, overflow check, clipping and optimizer; returns whether it was left out because of an overflow.

        Args:
            needed: versions of the weights that will be seen again, where training is asynchronous.
        """
        if self.optimizer is None:
            raise ConfigError(
                "there is no optimizer to step",
                where="optimizer",
                fix="add it to the JSON, or pass initialize(optimizer=...)",
            )
        norm = self.clipping.measure(self)
        overflow = not math.isfinite(norm) and skips_overflow(self._config)
        self._norm = (math.inf if overflow else norm) if self.zero.policy.compute_norm else None
        if overflow:
            tell_overflow(self)
        if not math.isfinite(norm) and not (
            overflow and (self.loss_scaler.dynamic or self.bfloat16_enabled())
        ):
            self.blame.tell(self, skipped=overflow)
        self.optimizer.overflow = overflow
        if self.versions is not None:
            self.versions.advance(needed)
        if not overflow:
            self.optimizer.step_scaled(self.clipping.take_factor(norm) / self.gradient_divisor())
        return overflow

    def gradient_divisor(self) -> float:
        """Of the gradients that are there at the end of a step, clipping apart."""
        mean = self._config.gradient_allreduce_op == "mean"
        return self.divisor_of_local() * (self.zero.mean_divisor if mean else self.zero.sum_divisor)

    def divisor_of_local(self) -> float:
        """Of gradients that no other rank has had a part in."""
        kinds = self.zero.hooks.kinds
        if len(kinds) == 2:
            check_scales(kinds, self.loss_scaler.scale, self.gradient_accumulation_steps())
        return self.gradient_accumulation_steps() if kinds == {False} else self.loss_scaler.scale

    @contextmanager
    def _whole_step(self) -> Iterator[None]:
        """Inside, nobody looks at gradients or changes the optimizer before the step."""
        self._step_follows = True
        try:
            yield
        finally:
            self._step_follows = False

    def _count(self, overflow: bool) -> None:
        self._applied = not overflow
        self.skipped_steps += overflow
        self.global_steps += 1
        samples = self._samples()
        self.global_samples += samples
        self._backwards = 0
        self.watch.counted(self, samples)

    def _samples(self) -> int:
        """Sequences of the present step over all ranks."""
        if self.managed_gradient_accumulation():
            return self.train_batch_size()
        return self.train_micro_batch_size_per_gpu() * self.dp_world_size * self._backwards

    # ---- accumulation -----------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present microbatch is the last of a step; with `managed_gradient_accumulation: false` only the
        caller knows, and the answer is False."""
        if self._boundary is not None:
            return self._boundary
        return (
            self.managed_gradient_accumulation()
            and self._microbatches + 1 >= self.gradient_accumulation_steps()
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say it explicitly, from now on; counting is off."""
        if not self.managed_gradient_accumulation():
            raise MisplacedCallError(
                "set_gradient_accumulation_boundary() has nothing to say: every step() is a boundary",
                where="managed_gradient_accumulation is false",
                fix="call step() where an optimizer step is due, or set the key to true",
            )
        self._boundary = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing gradient_accumulation_steps."""
        per_step = self.train_micro_batch_size_per_gpu() * self.mesh.dp.degree
        if train_batch_size < per_step or train_batch_size % per_step:
            raise ConfigError(
                f"train_batch_size {train_batch_size} is no multiple of {per_step} "
                f"(micro batch {self.train_micro_batch_size_per_gpu()} x {self.mesh.dp.degree} ranks)",
                fix=f"use a multiple of {per_step}",
            )
        steps = train_batch_size // per_step
        self._config = self._config.model_copy(
            update={"train_batch_size": train_batch_size, "gradient_accumulation_steps": steps}
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, at every stage. At stages 2 and 3 the whole gradient is held meanwhile.

        Raises:
            MisplacedCallError: inside another `no_sync()` or `coalesce_grad_reduction()`.
        """
        if not self.zero.reducer.sync:
            raise MisplacedCallError(
                "no_sync() and coalesce_grad_reduction() cannot be nested", fix="enter one of them, once"
            )
        self.zero.reducer.sync = False
        try:
            yield
        finally:
            self.zero.reducer.sync = True

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """The backwards of one step, at every stage: they only accumulate, and their gradients are reduced together
        when the `with` ends. Then comes step(). The whole gradient is held meanwhile.

        Raises:
            MisplacedCallError: inside another `no_sync()` or `coalesce_grad_reduction()`.
        """
        with self.no_sync():
            yield
        self.zero.reducer.boundary = True
        self.zero.reducer.flush()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Nothing is left to do: gradients are reduced while backward goes on, and all have been when step() begins."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.discard()

    def abandon_step(self) -> None:
        """Forget the microbatches since the last optimizer step."""
        if self.optimizer is not None:
            self.optimizer.forget_in_backward()
        self.zero.zero_grad()
        self.watch.forget()
        self.blame.forget()
        self._microbatches = self._backwards = 0

    # ---- whole batches ----------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """gradient_accumulation_steps microbatches and one step; returns the mean loss over them and over dp."""
        self.train()
        with self.watch.batch(self) as told:
            trained = self._train_stages if self.runtime is not None else self._train_whole
            loss = trained(data_iter)
            told.append(loss)
        return loss

    def _train_whole(self, data_iter: Iterator[Any] | None) -> Tensor:
        total = torch.zeros((), device=self.device)
        for left in reversed(range(self.gradient_accumulation_steps())):
            with self._whole_step():
                loss = self._loss_of(self._read(data_iter))
                self.backward(loss)
            total += loss.detach().float()
            if left == 0 or self.managed_gradient_accumulation():
                self.step()
        return self._mean(total / self.gradient_accumulation_steps())

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Without gradients: the mean loss over gradient_accumulation_steps microbatches and over dp. Monitors get it.

        Args:
            data_iter: read on the ranks of the first stage.
            return_logits: (loss, outputs of the last microbatch); the outputs are on the last stage, None elsewhere.
            compute_loss: false: the outputs take the place of the losses; labels are not looked at.
            reduce_output: "avg", or None for a list of all microbatches.
            bcast_loss: false: stages before the last one get None.
            num_micro_batches: another number of them.
        """
        training = self.training
        self.eval()
        number = num_micro_batches or self.gradient_accumulation_steps()
        keeps = return_logits or not compute_loss
        losses, outputs = losses_and_outputs(
            self, self._pulled(data_iter, number), with_loss=compute_loss, with_outputs=keeps
        )
        self.train(training)
        if compute_loss and self.watch.monitor.enabled:  # the same on all ranks
            self.watch.evaluated(self, float(reduced(self, losses, "avg")))
        told = self.is_last_stage() or (compute_loss and bcast_loss)
        value = reduced(self, losses if compute_loss else outputs, reduce_output) if told else None
        return (value, outputs[-1] if outputs else None) if return_logits else value

    def _train_stages(self, data_iter: Iterator[Any] | None) -> Tensor:
        number = self.gradient_accumulation_steps()
        batches = self._pulled(data_iter, number)
        loss = self.run_microbatches(batches, [1 / number] * number)
        self.step()
        return self._mean(torch.tensor(loss, device=self.device))

    def run_microbatches(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        """Forward and backward of all microbatches of a step, through all stages; `step()` comes next.

        Args:
            batches: read on the ranks of the first stage only, and so are the weights.
            weights: of each microbatch in the loss; its gradient is multiplied with that.

        Returns:
            the sum of weight x loss over the microbatches, on all stages; those of weight 0 do not count.
        """
        batches = [self.curriculum.cut(batch, self.global_steps) for batch in batches]
        if self.runtime is not None:
            return self._run_stages(batches, weights)
        losses: list[Tensor] = []
        for batch, weight in zip(batches, weights, strict=True):
            if losses and self.managed_gradient_accumulation():
                self.step()  # of the microbatch before: it only counts
            with self._whole_step():
                loss = self._loss_of(batch)
                self.backward(loss * weight, scale_wrt_gas=False)
            losses.append(loss.detach())
        return pipelined.weighted([float(loss) for loss in losses], weights)

    def _run_stages(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        watch_gradients(self.zero, self.loss_scaler.at_floor)
        with self.zero.hooks.scaling():
            losses, weights = pipelined.train(self, batches, weights)
        total = pipelined.weighted(losses, weights)
        self.watch.loss(torch.tensor(total), 1.0)
        self._backwards += len(losses)
        self._microbatches += len(losses) - 1
        self.micro_steps += len(losses) - 1
        return total

    @torch.no_grad()
    def eval_microbatches(self, batches: Sequence[Any], weights: Sequence[float]) -> float:
        """As `run_microbatches`, without gradients."""
        if self.runtime is not None:
            return pipelined.weighted(*pipelined.evaluate(self, batches, weights))
        return pipelined.weighted([float(self._loss_of(batch)) for batch in batches], weights)

    def _loss_of(self, batch: Any) -> Tensor:
        with loss_only():
            return loss_in(call(self, to_device(batch, self.device)))

    def _mean(self, value: Tensor) -> Tensor:
        all_reduce(value, self.mesh.dp, "root/loss").wait()
        return value / self.mesh.dp.degree

    # ---- the rest ---------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
    ) -> None:
        """torch.compile the transformer blocks, one by one; gathering and reducing stay outside of the graphs. With
        "inductor", also the optimizer's step of 16-bit parameters on the CPU.

        DeepSpeed compiles the whole module. A second call does nothing.

        Args:
            backend, compile_kwargs: of torch.compile.
            schedule: of DeepCompile's passes; refused.
        """
        if schedule is not None:
            raise ConfigError(
                "schedule= is a list of DeepCompile's passes, and there are none here",
                where="Engine.compile()",
                fix="leave it out: the blocks are compiled with torch.compile",
            )
        if not self.is_compiled:
            compile_blocks(self.module, backend, compile_kwargs or {})
            if self.optimizer is not None and backend == "inductor":
                self.optimizer.compiles = True
            self.is_compiled = True

    def collect_python_gc(self) -> int:
        """Collect cyclic garbage now, whether the collector is off or not; returns how many objects went."""
        return gc.collect()

    def empty_partition_cache(self) -> None:
        """Free gathered parameters and idle buffers."""
        self.zero.reshard_all()

    def destroy(self) -> None:
        """Wait for a save in the background, close monitors, take hooks off, free buffers, delete what rests on NVMe,
        undo `disable_python_gc`."""
        self.saver.wait()
        self._destroyed = True
        if self._gc is not None:
            self._gc()
        self.watch.close()
        self.zero.hooks.remove()
        self.zero.reshard_all()
        self.zero.placements.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            module = super().__getattr__("module")
            explain = type(self).explain
            if explain is None or hasattr(module, name):
                return getattr(module, name)
            raise explain(name) from None
