"""Builds the configured `scheduler`: an object that the engine steps after each optimizer step.

DeepSpeed's schedules are curves in one class; torch's schedules are torch's own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from launcher.config import (
    DeepSpeedParams,
    LRRangeTestParams,
    OneCycleParams,
    SchedulerConfig,
    TorchParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from launcher.errors import ConfigError
from launcher.optim.curves import (
    Curve,
    one_cycle_lr,
    one_cycle_momentum,
    per_group,
    range_test_lr,
    warmup_cosine_lr,
    warmup_lr,
)

SECOND_BETA = 0.99
"""The second beta that DeepSpeed's OneCycle sets along with the momentum."""


class Schedule:
    """Sets the learning rate of every param group from a curve, and its momentum from another one, if given.

    Args:
        optimizer: its param_groups are changed in place.
        curve: the learning rate.
        last_batch_iteration: iteration to resume from; -1 is the start, and sets the values of that
            iteration.
        momentum: the first of `betas`; the second becomes 0.99. None: betas are not changed.
        first_momentum: the momentum of the param groups before the first step: DeepSpeed's OneCycle starts
            with the low value, although it reports the high one.
    """

    name = ""
    """The name of the DeepSpeed schedule, if it comes from the JSON config."""
    params: DeepSpeedParams | None = None
    """The keywords of the DeepSpeed schedule, if it is one."""

    def __init__(
        self,
        optimizer: Optimizer,
        curve: Curve,
        last_batch_iteration: int = -1,
        momentum: Curve | None = None,
        first_momentum: Sequence[float] = (),
    ) -> None:
        self.optimizer, self.curve, self.momentum = optimizer, curve, momentum
        self.first_momentum = first_momentum
        self.last_batch_iteration = last_batch_iteration
        self.base_lrs = self._last = [float(group["lr"]) for group in optimizer.param_groups]
        if last_batch_iteration < 0:
            self._set()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given one."""
        at = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = at
        self._set()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the current iteration, by param group."""
        return [self.curve(self.last_batch_iteration, group) for group in self._groups()]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the current iteration, by param group; None if momentum is not scheduled."""
        curve = self.momentum
        if curve is None:
            return None
        return [(curve(self.last_batch_iteration, group), SECOND_BETA) for group in self._groups()]

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were set last, by param group."""
        return list(self._last)

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration, "last_lr": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self._set()
        self._last = list(state.get("last_lr", self._last))  # the rate of the previous step, if it was saved
        self._write_rates()

    def _groups(self) -> range:
        return range(len(self.optimizer.param_groups))

    def _set(self) -> None:
        self._last = self.get_lr()
        self._write_rates()
        betas = self.get_mom() or []
        if self.last_batch_iteration < 0 and self.momentum is not None:
            betas = [(momentum, SECOND_BETA) for momentum in self.first_momentum] or betas
        for group, pair in zip(self.optimizer.param_groups, betas, strict=False):
            group["betas"] = pair

    def _write_rates(self) -> None:
        """Set the learning rates; tensors are filled in place, because compiled optimizers hold references to
        them."""
        for group, lr in zip(self.optimizer.param_groups, self._last, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def build_scheduler(config: SchedulerConfig, optimizer: Optimizer) -> Any:
    """Return the schedule that the config's `scheduler` specifies.

    Raises:
        ConfigError: a list does not have one entry per param group, or torch's class rejects its keywords.
    """
    params = config.params
    if isinstance(params, TorchParams):
        return _torch_schedule(config.type, params, optimizer)
    assert isinstance(params, DeepSpeedParams)
    schedule = Schedule(optimizer, *deepspeed_schedule(params, optimizer))
    schedule.name, schedule.params = config.type, params
    return schedule


def deepspeed_schedule(
    params: DeepSpeedParams, optimizer: Optimizer
) -> tuple[Curve, int, Curve | None, Sequence[float]]:
    """Return the arguments of `Schedule` after the optimizer, for one of DeepSpeed's five schedules."""
    lrs = [float(group["lr"]) for group in optimizer.param_groups]
    momentum: Curve | None = None
    first: Sequence[float] = ()
    if isinstance(params, OneCycleParams) and params.cycle_momentum and "betas" in optimizer.defaults:
        momentum = one_cycle_momentum(params, len(lrs))
        first = per_group("cycle_min_mom", params.cycle_min_mom, [0.0] * len(lrs))
    return _curve(params, lrs), params.last_batch_iteration, momentum, first


def _curve(params: DeepSpeedParams, lrs: list[float]) -> Curve:
    match params:
        case WarmupLRParams() | WarmupDecayLRParams():
            return warmup_lr(params, lrs)
        case WarmupCosineLRParams():
            return warmup_cosine_lr(params, lrs)
        case LRRangeTestParams():
            return range_test_lr(params, lrs)
        case OneCycleParams():
            return one_cycle_lr(params, lrs)
    raise ConfigError(f"unknown schedule parameters {type(params).__name__}", where="scheduler.type")


def _torch_schedule(name: str, params: TorchParams, optimizer: Optimizer) -> Any:
    keywords = {k: list(v) if isinstance(v, tuple) else v for k, v in params.keywords().items()}
    try:
        return getattr(torch.optim.lr_scheduler, name)(optimizer, **keywords)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"torch's {name} does not accept these keywords: {error}",
            where="scheduler.params",
            fix="change the params as the error says",
        ) from error
