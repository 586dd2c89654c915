"""Gradient accumulation: the accumulation boundary, when gradients are reduced, and what their sum is divided by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from launcher.engine.finite import check_scales
from launcher.errors import ConfigError, MisplacedCallError
from launcher.zero.reduce import BackwardPlan

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore


class AccumulationMixin:
    """The part of an Engine that counts microbatches."""

    _boundary: bool | None = None  # set by the caller; None: microbatches are counted
    _microbatches = 0  # in this step; micro_steps cannot be used after a change of the batch size
    _syncs = True  # False inside no_sync()

    def _core(self) -> EngineCore:
        return cast("EngineCore", self)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current microbatch is the last of a step. With `managed_gradient_accumulation:
        false` only the caller knows, and the result is False."""
        if self._boundary is not None:
            return self._boundary
        core = self._core()
        return (
            core.managed_gradient_accumulation()
            and self._microbatches + 1 >= core.gradient_accumulation_steps()
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary explicitly; from now on microbatches are not counted."""
        if not self._core().managed_gradient_accumulation():
            raise MisplacedCallError(
                "set_gradient_accumulation_boundary() has no effect: every step() is a boundary",
                where="managed_gradient_accumulation is false",
                fix="call step() only when an optimizer step is due, or set the key to true",
            )
        self._boundary = is_boundary

    def check_whole_step(self) -> None:
        """Check that all microbatches of a step may run now.

        Raises:
            MisplacedCallError: inside no_sync(), or the caller has set that no step is due.
        """
        if not self._syncs:
            raise MisplacedCallError(
                "engine.train_batch() was called inside no_sync()",
                where="engine.train_batch()",
                fix="call it outside no_sync()",
            )
        if self._boundary is False:
            raise MisplacedCallError(
                "engine.train_batch() runs a whole step, but set_gradient_accumulation_boundary(False) was called",
                where="engine.train_batch()",
                fix="call set_gradient_accumulation_boundary(True) before it",
            )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by changing gradient_accumulation_steps."""
        core = self._core()
        micro, dp = core.train_micro_batch_size_per_gpu(), core.mesh.dp.degree
        per_step = micro * dp
        if train_batch_size < per_step or train_batch_size % per_step:
            raise ConfigError(
                f"train_batch_size {train_batch_size} is not a multiple of {per_step} "
                f"(micro batch {micro} x {dp} ranks)",
                fix=f"use a multiple of {per_step}",
            )
        steps = train_batch_size // per_step
        core._config = core._config.model_copy(
            update={"train_batch_size": train_batch_size, "gradient_accumulation_steps": steps}
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, at every stage. Stages 2 and 3 then keep the unsharded gradient.

        Raises:
            MisplacedCallError: inside another `no_sync()` or `coalesce_grad_reduction()`.
        """
        if not self._syncs:
            raise MisplacedCallError(
                "no_sync context manager reentry is unsupported: it and coalesce_grad_reduction() cannot be nested",
                fix="enter only one of them, once",
            )
        self._set_syncs(False)
        try:
            yield
        finally:
            self._set_syncs(True)

    def _set_syncs(self, syncs: bool) -> None:
        reducer = self._core().zero.reducer
        self._syncs, reducer.plan = syncs, replace(reducer.plan, reduces=syncs)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backwards of a step together, at every stage.

        Inside the context gradients only accumulate; they are reduced on exit, before step(). This keeps the
        unsharded gradient.

        Raises:
            MisplacedCallError: inside another `no_sync()` or `coalesce_grad_reduction()`.
        """
        with self.no_sync():
            yield
        reducer = self._core().zero.reducer
        reducer.plan = BackwardPlan()
        reducer.flush()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: gradients are reduced during backward, and completely before the optimizer steps."""

    def gradient_divisor(self) -> float:
        """Return the divisor of the gradients at the end of a step, without clipping."""
        core = self._core()
        mean = core._config.gradient_allreduce_op == "mean"
        # the ranks of cp share one loss, so its gradient is averaged over cp even if it is summed over dp
        of_ranks = core.zero.mean_divisor if mean else core.zero.sum_divisor * core.mesh.axes["cp"].degree
        return self.divisor_of_local() * of_ranks

    def divisor_of_local(self) -> float:
        """Return the divisor of gradients that have not been reduced over the ranks."""
        core = self._core()
        scaled, steps = core.zero.hooks.losses_were_scaled, core.gradient_accumulation_steps()
        if len(scaled) == 2:  # the loss scale was applied to only some losses of the step
            check_scales(scaled, core.loss_scaler.scale, steps)
        return steps if scaled == {False} else core.loss_scaler.scale

    def samples_of_step(self) -> int:
        """Return the number of sequences of the current step over all ranks."""
        core = self._core()
        if core.managed_gradient_accumulation():
            return core.train_batch_size()
        # a script may call loss.backward() itself, which is not counted
        return core.train_micro_batch_size_per_gpu() * core.dp_world_size * (core._backwards or 1)
