"""DeepSpeed's schedules as functions of the iteration, which is the number of schedule steps minus one.

Iteration -1 is the construction of the schedule. Warm-up has the same value at -1 and 0, so the first two
optimizer steps use it, as in DeepSpeed 0.19; LRRangeTest and OneCycle already change at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from launcher.config import (
    LRRangeTestParams,
    OneCycleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from launcher.errors import ConfigError

Curve = Callable[[int, int], float]
"""(iteration, index of the param group) -> learning rate or momentum."""


def warmup(iteration: int, steps: int, kind: str) -> float:
    """Return the progress of a warm-up at `iteration`, from 0 to 1, logarithmic or linear."""
    steps, iteration = max(2, steps), max(0, iteration)
    if iteration >= steps:
        return 1.0
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def warmup_lr(params: WarmupLRParams | WarmupDecayLRParams, lrs: Sequence[float]) -> Curve:
    """Return the curve of WarmupLR, or of WarmupDecayLR if `params` has a `total_num_steps`."""
    lows = per_group("warmup_min_lr", params.warmup_min_lr, lrs)
    highs = per_group("warmup_max_lr", params.warmup_max_lr, lrs)
    total = params.total_num_steps if isinstance(params, WarmupDecayLRParams) else None
    steps = max(2, params.warmup_num_steps)

    def curve(iteration: int, group: int) -> float:
        gamma = warmup(iteration, steps, params.warmup_type)
        if total is not None and iteration >= steps:
            gamma = max(0.0, (total - iteration) / max(1.0, total - steps))
        return lows[group] + (highs[group] - lows[group]) * gamma

    return curve


def warmup_cosine_lr(params: WarmupCosineLRParams, lrs: Sequence[float]) -> Curve:
    """Return the curve of WarmupCosineLR, which scales the optimizer's own learning rates."""
    steps = max(2, params.warmup_num_steps)
    low, end = params.warmup_min_ratio, params.cos_min_ratio

    def curve(iteration: int, group: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < steps:
            return lrs[group] * (low + (1 - low) * warmup(iteration, steps, params.warmup_type))
        done = (iteration - steps + 1) / max(1, params.total_num_steps - steps)
        return lrs[group] * max(0.0, end + (1 - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)

    return curve


def range_test_lr(params: LRRangeTestParams, lrs: Sequence[float]) -> Curve:
    """Return the curve of LRRangeTest: unbounded growth, linear or in stairs."""
    lows = per_group("lr_range_test_min_lr", params.lr_range_test_min_lr, lrs)

    def curve(iteration: int, group: int) -> float:
        intervals = (iteration + 1) / params.lr_range_test_step_size
        if params.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return lows[group] * (1 + params.lr_range_test_step_rate * intervals)

    return curve


def one_cycle_lr(params: OneCycleParams, lrs: Sequence[float]) -> Curve:
    """Return the learning-rate curve of OneCycle: low, high, low, then decaying."""
    lows = per_group("cycle_min_lr", params.cycle_min_lr, lrs)
    highs = per_group("cycle_max_lr", params.cycle_max_lr, lrs)

    def curve(iteration: int, group: int) -> float:
        intervals = _intervals_after(params, iteration)
        if intervals is None:
            return lows[group] + (highs[group] - lows[group]) * height(params, iteration)
        return lows[group] / (1 + params.decay_lr_rate * intervals)

    return curve


def one_cycle_momentum(params: OneCycleParams, groups: int) -> Curve:
    """Return the momentum curve of OneCycle: high, low, high, then growing with `decay_mom_rate`."""
    lows = per_group("cycle_min_mom", params.cycle_min_mom, [0.0] * groups)
    highs = per_group("cycle_max_mom", params.cycle_max_mom, [0.0] * groups)

    def curve(iteration: int, group: int) -> float:
        intervals = _intervals_after(params, iteration)
        if intervals is None:
            return highs[group] - (highs[group] - lows[group]) * height(params, iteration)
        return highs[group] * (1 + params.decay_mom_rate * intervals)

    return curve


def height(params: OneCycleParams, iteration: int) -> float:
    """Return the height of the cycle at `iteration`: from 0 at its ends to 1 in its middle, linear or in
    stairs."""
    up, down = _halves(params)
    stairs_up = params.cycle_first_stair_count
    stairs_down = stairs_up if params.cycle_second_stair_count is None else params.cycle_second_stair_count
    at = (iteration + 1) % (up + down)
    done, half, stairs = (at, up, stairs_up) if at <= up else (up + down - at, down, stairs_down)
    return math.floor(done * stairs / half) / stairs if stairs else done / half


def per_group(key: str, value: float | Sequence[float] | None, default: Sequence[float]) -> list[float]:
    """Return one value for each param group.

    Args:
        key: its name in `scheduler.params`.
        value: one for all groups, a list, or None for `default`.
        default: one for each param group.

    Raises:
        ConfigError: a list does not have one entry per param group.
    """
    if value is None:
        return list(default)
    values = list(value) if isinstance(value, Sequence) else [float(value)] * len(default)
    if len(values) != len(default):
        raise ConfigError(
            f"{len(values)} values for {len(default)} param groups",
            where=f"scheduler.params.{key}",
            fix=f"use one number, or {len(default)}",
        )
    return values


def _halves(params: OneCycleParams) -> tuple[int, int]:
    up, down = params.cycle_first_step_size, params.cycle_second_step_size
    return up, up if down is None else down


def _intervals_after(params: OneCycleParams, iteration: int) -> float | None:
    """Return the decay intervals since the end of the cycle; None during the cycle, 0 without decay."""
    over = iteration - sum(_halves(params)) + 1
    if over < 1:
        return None
    return over / params.decay_step_size if params.decay_step_size else 0.0
