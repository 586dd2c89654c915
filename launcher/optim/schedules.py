"""DeepSpeed's warm-up schedules, as functions of the number of scheduler steps taken.

The engine steps the schedule after each optimizer step. As in DeepSpeed 0.19 the first two optimizer steps see the
value of iteration 0: one from the construction, one from the first step of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from launcher.config import SchedulerConfig, WarmupCosineLRParams, WarmupDecayLRParams, WarmupLRParams
from launcher.errors import ConfigError

# (iteration, the group's own learning rate at the start, index of the group) -> learning rate
Curve = Callable[[int, float, int], float]


class Schedule:
    """Sets the learning rate of every param group by a curve.

    Args:
        optimizer: its param_groups are changed in place.
        curve: the learning rate by iteration.
        last_batch_iteration: iteration to go on from; -1 is the start.
        start: learning rate before the first step of the schedule, by group; None: the curve at iteration 0.
    """

    def __init__(
        self, optimizer: Optimizer, curve: Curve, last_batch_iteration: int = -1, start: float | None = None
    ) -> None:
        self.optimizer, self.curve = optimizer, curve
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration < 0:
            self._set([self._at(0, i) if start is None else start for i in range(len(self.base_lrs))])

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given."""
        at = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = at
        self._set([self._at(at, i) for i in range(len(self.base_lrs))])

    def get_lr(self) -> list[float]:
        """Learning rates of the present iteration, by param group."""
        return [self._at(max(self.last_batch_iteration, 0), i) for i in range(len(self.base_lrs))]

    def get_last_lr(self) -> list[float]:
        """Learning rates that were set last, by param group."""
        return list(self._last)

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_batch_iteration": self.last_batch_iteration,
            "base_lrs": self.base_lrs,
            "last_lr": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self.base_lrs = list(state["base_lrs"])
        self._set(list(state["last_lr"]))

    def _at(self, iteration: int, group: int) -> float:
        return self.curve(iteration, self.base_lrs[group], group)

    def _set(self, lrs: list[float]) -> None:
        self._last = lrs
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr


def warmup(iteration: int, steps: int, kind: str) -> float:
    """How far the warm-up of `steps` iterations has come at `iteration`: 0 .. 1, along a logarithm or a line."""
    steps = max(2, steps)
    if iteration >= steps:
        return 1.0
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def warmup_lr(params: WarmupLRParams | WarmupDecayLRParams, lrs: Sequence[float]) -> Curve:
    """DeepSpeed's WarmupLR, and WarmupDecayLR where `params` has a `total_num_steps`."""
    lows = _per_group(params.warmup_min_lr, lrs)
    highs = _per_group(params.warmup_max_lr, lrs)
    total = params.total_num_steps if isinstance(params, WarmupDecayLRParams) else None
    steps = max(2, params.warmup_num_steps)

    def curve(iteration: int, lr: float, group: int) -> float:
        gamma = warmup(iteration, steps, params.warmup_type)
        if total is not None and iteration >= steps:
            gamma = max(0.0, (total - iteration) / max(1.0, total - steps))
        return lows[group] + (highs[group] - lows[group]) * gamma

    return curve


def warmup_cosine_lr(params: WarmupCosineLRParams) -> Curve:
    """DeepSpeed's WarmupCosineLR: ratios of the optimizer's own learning rate."""
    steps = max(2, params.warmup_num_steps)
    low, end = params.warmup_min_ratio, params.cos_min_ratio

    def curve(iteration: int, lr: float, group: int) -> float:
        if iteration < steps:
            return lr * (low + (1 - low) * warmup(iteration, steps, params.warmup_type))
        done = (iteration - steps + 1) / max(1, params.total_num_steps - steps)
        return lr * max(0.0, end + (1 - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)

    return curve


def build_scheduler(config: SchedulerConfig, optimizer: Optimizer) -> Schedule:
    """The schedule that the JSON's `scheduler` names.

    Raises:
        ConfigError: a list of rates has not one entry a param group.
    """
    params, last = config.params, config.params.last_batch_iteration
    lrs = [float(group["lr"]) for group in optimizer.param_groups]
    if isinstance(params, WarmupCosineLRParams):
        return Schedule(optimizer, warmup_cosine_lr(params), last, start=0.0)
    if isinstance(params, WarmupLRParams | WarmupDecayLRParams):
        return Schedule(optimizer, warmup_lr(params, lrs), last)
    raise ConfigError(f"the schedule {config.type} is not implemented here yet", where="scheduler.type")


def _per_group(value: float | Sequence[float] | None, lrs: Sequence[float]) -> list[float]:
    if value is None:
        return list(lrs)
    values = list(value) if isinstance(value, Sequence) else [float(value)] * len(lrs)
    if len(values) != len(lrs):
        raise ConfigError(
            f"{len(values)} learning rates for {len(lrs)} param groups", where="scheduler.params"
        )
    return values
