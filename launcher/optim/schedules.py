"""The JSON's `scheduler` -> an object that the engine steps after each optimizer step.

DeepSpeed's schedules are curves over one class; torch's are torch's own classes.
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
"""What DeepSpeed's OneCycle writes beside the momentum."""


class Schedule:
    """Sets the learning rate of every param group by a curve, and its momentum by another where there is one.

    Args:
        optimizer: its param_groups are changed in place.
        curve: the learning rate.
        last_batch_iteration: iteration to go on from; -1 is the start, and sets the values of that iteration.
        momentum: the first of `betas`, whose second becomes 0.99; None: it stays.
        first_momentum: what param groups have instead before the first step: DeepSpeed's OneCycle starts low there,
            though it tells the high one.
    """

    name = ""
    """Which of DeepSpeed's it is, where the JSON named it."""
    params: DeepSpeedParams | None = None
    """Its keywords, where it is one of DeepSpeed's."""

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
        """Go to the next iteration, or to the one given."""
        at = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = at
        self._set()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the present iteration, by param group."""
        return [self.curve(self.last_batch_iteration, group) for group in self._groups()]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the present iteration, by param group; None where momentum stays."""
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
        self._last = list(state.get("last_lr", self._last))  # the rate of the step before, where it is known
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
        """Write the rates. One that is a tensor stays one: compiled optimizers have it in hand."""
        for group, lr in zip(self.optimizer.param_groups, self._last, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def build_scheduler(config: SchedulerConfig, optimizer: Optimizer) -> Any:
    """Return the schedule that the JSON's `scheduler` names.

    Raises:
        ConfigError: a list has not one entry a param group, or torch's class refuses its keywords.
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
    """Return what `Schedule` takes besides the optimizer, for the keywords of one of DeepSpeed's five."""
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
    raise ConfigError(f"{type(params).__name__} has no curve", where="scheduler.type")


def _torch_schedule(name: str, params: TorchParams, optimizer: Optimizer) -> Any:
    keywords = {k: list(v) if isinstance(v, tuple) else v for k, v in params.keywords().items()}
    try:
        return getattr(torch.optim.lr_scheduler, name)(optimizer, **keywords)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"torch's {name} does not take these keywords: {error}",
            where="scheduler.params",
            fix="change them as it says",
        ) from error
