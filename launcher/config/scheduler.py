"""`scheduler`: how the learning rate moves over optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from pydantic import field_validator

from launcher.config.deepspeed_schedules import (
    LRRangeTestParams,
    OneCycleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from launcher.config.optimizer import TYPES, OptimizerConfig
from launcher.config.problems import show
from launcher.config.schedule_params import SchedulerParams
from launcher.config.section import Conflict, Remark, Section, complaint
from launcher.config.suggest import nearest
from launcher.config.torch_schedules import NEED_PYTHON, TORCH

PARAMS: dict[str, type[SchedulerParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    **TORCH,
}
"""Type -> its params."""

ParamsClass: TypeAlias = type[SchedulerParams]


class SchedulerConfig(Section):
    """Which schedule, and its keywords. It is stepped inside engine.step(), after each optimizer step."""

    type: str
    """DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest or OneCycle, or a class of
    torch.optim.lr_scheduler whose keywords JSON can hold."""

    params: SchedulerParams
    """Keywords of the schedule; the class follows from `type`."""

    @field_validator("type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        if name in PARAMS:
            return name
        if name in NEED_PYTHON:
            use = "use another type"
            raise complaint(
                f"{name} {NEED_PYTHON[name]}", f"{use}, or build it and pass initialize(lr_scheduler=...)"
            )
        near = nearest(name, PARAMS)
        meant = f'did you mean "{near}"?' if near else f"use one of {', '.join(PARAMS)}"
        raise complaint(f"unknown scheduler type {show(name)}", meant)

    @classmethod
    def section_of(cls, key: str, tree: Mapping[str, Any]) -> ParamsClass | None:
        return PARAMS.get(str(tree.get("type"))) if key == "params" else None

    @classmethod
    def sections_of(cls, key: str) -> tuple[ParamsClass, ...]:
        return tuple(PARAMS.values()) if key == "params" else ()


def cycled_without_momentum(
    scheduler: SchedulerConfig | None, optimizer: OptimizerConfig | None
) -> Iterator[Conflict]:
    """torch's classes refuse to cycle the momentum of an optimizer that has none."""
    if scheduler is None or optimizer is None or scheduler.type not in TORCH:
        return
    takes = TYPES[optimizer.type].keywords
    if getattr(scheduler.params, "cycle_momentum", False) and not {"betas", "momentum"} & set(takes):
        keys = ("scheduler.params.cycle_momentum", "optimizer.type")
        what = f"is true unless it is written, and the optimizer {optimizer.type} has no momentum"
        yield Conflict(keys, what, 'write "cycle_momentum": false, or use an optimizer with momentum')


def remarks_on_momentum(
    scheduler: SchedulerConfig | None, optimizer: OptimizerConfig | None
) -> Iterator[Remark]:
    """What OneCycle does to momentum, which people do not expect."""
    if scheduler is None or optimizer is None or not isinstance(scheduler.params, OneCycleParams):
        return
    key = "scheduler.params.cycle_momentum"
    if scheduler.params.cycle_momentum and "betas" not in TYPES[optimizer.type].keywords:
        yield Remark(key, f"{optimizer.type} has no betas: its momentum stays, as in DeepSpeed")
    elif scheduler.params.cycle_momentum:
        yield Remark(
            key, "betas become [the cycle's momentum, 0.99], as in DeepSpeed; false keeps the optimizer's"
        )
