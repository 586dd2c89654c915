"""Learning rate and optimizer options after resuming: logs which apply if config and checkpoint differ."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from launcher.checkpoint.place_in_schedule import steps_in_schedule
from launcher.optim.saved_groups import saved_groups
from launcher.optim.schedules import Schedule

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

logger = logging.getLogger("launcher")

OF_A_STEP = {"betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "alpha", "rho"}
"""Param group options that affect a step, except learning rates."""


def tell_rates(engine: Engine, meta: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
    """Log on rank 0, in one line, which learning rate applies after loading a checkpoint with other rates in
    its config.

    Args:
        meta: metadata of the checkpoint.
        optimizer, scheduler: whether their states, which contain learning rates, were loaded.
    """
    if engine.global_rank or not (optimizer or scheduler):
        return
    steps, rate = steps_in_schedule(meta["scheduler"]), f"{engine.get_lr()[0]:g}"
    if scheduler and engine.lr_scheduler is not None and steps is not None:
        placed = state_at(engine.lr_scheduler, steps) is not None
        at = f"continues at step {steps} with learning rate {rate}" if placed else "starts at its first step"
        logger.warning("the checkpoint has no schedule state: the schedule of this run %s", at)
        return
    if scheduler and engine.lr_scheduler is not None and meta["scheduler"] is None:
        logger.warning(
            "the checkpoint has no schedule state: the schedule of this run starts at its first step"
        )
        return
    if optimizer and engine.lr_scheduler is None and meta["scheduler"] is not None:
        had = (
            "the checkpoint had a schedule, but this run has none"
            if steps is None
            else "this run has no schedule"
        )
        logger.warning("%s: the learning rate stays at %s", had, rate)
        return
    changes = list(_changes(meta.get("config"), engine.config))
    if not changes:
        return
    if scheduler and isinstance(engine.lr_scheduler, Schedule):
        what = (
            "the schedule continues with the current values of the JSON, after one more step at the "
            "checkpoint's rate"
        )
    elif scheduler and engine.lr_scheduler is not None:
        what = (
            "using the value of the checkpoint's schedule; load_lr_scheduler_states=False restarts the "
            "schedule"
        )
    elif optimizer and engine.lr_scheduler is None:
        what = (
            f"using the checkpoint's value, {engine.get_lr()[0]:g}; change it with engine.set_lr() or "
            "a scheduler"
        )
    else:
        return
    logger.warning("learning rate: %s: %s", "; ".join(changes), what)


def state_at(schedule: Any, steps: int) -> dict[str, Any] | None:
    """Return the state of a schedule after `steps` steps, or None if the state is more than a step count."""
    if isinstance(schedule, Schedule):  # DeepSpeed schedules use their first rate twice
        return {"last_batch_iteration": steps - 1}
    others = SequentialLR | ChainedScheduler | ReduceLROnPlateau
    if isinstance(schedule, LRScheduler) and not isinstance(schedule, others):
        return {**schedule.state_dict(), "last_epoch": steps, "_step_count": steps + 1}
    return None


def tell_options(engine: Engine, meta: Mapping[str, Any]) -> None:
    """Log on rank 0, in one line, which optimizer options the checkpoint changes. Call it before they are
    loaded. `tell_rates` logs learning rates, if the checkpoint contains its config."""
    if engine.global_rank or engine.optimizer is None or meta["optimizer"] is None:
        return
    saved, told = meta["optimizer"]["param_groups"], dict[str, None]()
    numbers = saved_groups(meta["optimizer"], engine.optimizer.group_names())
    keys = OF_A_STEP if meta.get("config") else {*OF_A_STEP, "lr"}
    for group, number in zip(engine.optimizer.param_groups, numbers, strict=True):
        for key in sorted(keys & group.keys() & saved[number].keys()):
            was, now = _plain(saved[number][key]), _plain(group[key])
            if was != now:
                told[f"{key} {was} instead of {now}"] = None
    if told:
        logger.warning(
            "using the optimizer options of the checkpoint: %s. To change them, edit "
            "engine.optimizer.param_groups after loading",
            "; ".join(told),
        )


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, torch.Tensor | int | float) else value


def _changes(was: Any, now: Any) -> Iterator[str]:
    for section in ("optimizer", "scheduler"):
        before, after = _params(was, section), _params(now, section)
        for key in sorted(before.keys() & after.keys()):
            if "lr" in key.split("_") and before[key] != after[key]:
                yield f"{section}.params.{key} was {before[key]} in the checkpoint and is now {after[key]}"


def _params(config: Any, section: str) -> Mapping[str, Any]:
    found = config.get(section) if isinstance(config, Mapping) else None
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}
