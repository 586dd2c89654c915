"""Checks before an optimizer step: missing or non-finite gradients, and inconsistent loss scales."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from launcher.config import Config
from launcher.engine.dtypes import scales_loss
from launcher.errors import LauncherError, UnusedParametersError, first_names
from launcher.optim.loss_scale import LossScaleExhausted
from launcher.optim.whole import WholeOptimizer
from launcher.zero import ZeroModel
from launcher.zero.features.overflow import find_overflows, in_words

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore

logger = logging.getLogger("launcher")


def skips_overflow(config: Config) -> bool:
    """Return whether a step with a non-finite gradient is skipped."""
    return scales_loss(config) or bool(config.bf16.enabled and config.bf16.check_grad_overflow)


def can_step_in_backward(engine: EngineCore) -> bool:
    """Return whether a buffer can be stepped before all gradients are available: its gradient is final after
    its reduction over dp, and its step does not depend on other gradients."""
    config, zero = engine._config, engine.zero
    alone = zero.tp.degree == zero.pp.degree == 1 and zero.checks is None
    optimizer = engine.optimizer
    whole = (
        optimizer is not None and engine.versions is None and not isinstance(optimizer.inner, WholeOptimizer)
    )
    known = float(config.gradient_clipping) == 0 and not skips_overflow(config)
    known = known and config.fault_tolerance.replicas == 1  # otherwise the step needs the mean over replicas
    # replica_check compares values before any of them changes
    known = known and not (config.replica_check.resting or config.replica_check.replay_every)
    return alone and whole and known and config.zero_optimization.ignore_unused_parameters


def check_unused(zero: ZeroModel, used: list[bool]) -> None:
    """Raise UnusedParametersError if a trainable parameter has no gradient (`ignore_unused_parameters`)."""
    slots = [slot for gradient in zero.gradients for slot in gradient.flat.slots]
    names = [slot.name for slot, flag in zip(slots, used, strict=True) if not flag]
    if names:
        raise UnusedParametersError(
            f"{len(names)} parameters got no gradient in this step: {first_names(names)}",
            where="zero_optimization.ignore_unused_parameters is false",
            fix="freeze them, use them in the loss, or set the key to true",
        )


def check_scales(kinds: set[bool], loss_scale: float, accumulation: int) -> None:
    """Raise LauncherError if only some losses of a step were scaled (by `engine.backward`)."""
    if len(kinds) == 2 and (loss_scale != 1 or accumulation > 1):
        raise LauncherError(
            "some gradients of this step came through engine.backward(), which scales the loss (fp16 "
            f"loss scale {loss_scale:g}, {accumulation} microbatches), and some through a plain "
            "loss.backward()",
            where="engine.step()",
            fix="call engine.backward(loss) for every loss of the step",
        )


def tell_overflow(engine: EngineCore) -> None:
    """Report the parameters that overflowed, if this ends the run or, with decreasing frequency, in bf16.

    Raises:
        LossScaleExhausted: on every rank; the engine is in the state before this step.
    """
    if engine.loss_scaler.exhausted:
        which = in_words(find_overflows(engine.zero), watched=True)
        engine.abandon_step()
        raise LossScaleExhausted(engine.loss_scaler.scale, which)
    skipped = engine.skipped_steps + 1
    if engine.bfloat16_enabled() and skipped & (skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
        which = in_words(find_overflows(engine.zero))
        if engine.mesh.rank == 0:
            what = f"step {engine.global_steps + 1} is skipped ({skipped} so far): the gradient is not finite"
            print(f"{what} of {which} (bf16.check_grad_overflow is true)", flush=True)
