"""`scheduler`: how the learning rate moves over optimizer steps, and the keywords of DeepSpeed's own five schedules.

What they compute is in `launcher/optim/schedules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator

from launcher.config.problems import in_json, nearest
from launcher.config.section import Section
from launcher.config.torch_schedules import NEED_PYTHON, TORCH, SchedulerParams
from launcher.config.values import Count, Rate, Rates, WholeNumber, complaint, whole


class DeepSpeedParams(SchedulerParams):
    """The key that DeepSpeed's schedules share."""

    last_batch_iteration: Annotated[int, BeforeValidator(whole), Field(ge=-1)] = -1
    """Iteration to resume from; -1 is the start. Otherwise the first optimizer step keeps the optimizer's own rate, and
    the next one has that of the iteration after this one. Checkpoints save the position."""


class WarmupParams(DeepSpeedParams):
    """Keys that every warm-up schedule has."""

    warmup_num_steps: WholeNumber = 1000
    """Optimizer steps of warm-up; 0 and 1 are taken as 2, as in DeepSpeed."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warm-up. Log is DeepSpeed's default: steep at first."""


class WarmupLRParams(WarmupParams):
    """WarmupLR: from min to max, then constant."""

    warmup_min_lr: Rates = 0.0
    """Learning rate at the start; a list has one for each param group."""

    warmup_max_lr: Rates | None = None
    """Learning rate after the warm-up; a list has one for each param group; null: the optimizer's."""


class WarmupDecayLRParams(WarmupParams):
    """WarmupDecayLR: from min to max, then linearly to min at `total_num_steps`."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"total_num_steps"})

    total_num_steps: Count
    """Optimizer step at which the learning rate is warmup_min_lr again."""

    warmup_min_lr: Rates = 0.0
    """Learning rate at the start and at the end; a list has one for each param group."""

    warmup_max_lr: Rates = 1e-3
    """Learning rate after the warm-up; a list has one for each param group."""


class WarmupCosineLRParams(WarmupParams):
    """WarmupCosineLR: ratios of the optimizer's learning rate; up, then down along half a cosine."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"total_num_steps"})

    total_num_steps: Count
    """Optimizer step at which the cosine ends."""

    warmup_min_ratio: Rate = 0.0
    """Ratio at the start."""

    cos_min_ratio: Rate = 1e-4
    """Ratio at the end."""


class LRRangeTestParams(DeepSpeedParams):
    """LRRangeTest: the rate grows without end, to find the largest that trains (Smith 2018, arXiv:1803.09820)."""

    lr_range_test_min_lr: Rates = 1e-3
    """Learning rate at the start; a list has one for each param group."""

    lr_range_test_step_size: Count = 2000
    """Optimizer steps in which the rate grows by `lr_range_test_step_rate` times the first one."""

    lr_range_test_step_rate: float = 1.0
    """Growth in `lr_range_test_step_size` steps, as a multiple of the first rate."""

    lr_range_test_staircase: bool = False
    """Grow once every `lr_range_test_step_size` steps, not at each."""


class OneCycleParams(DeepSpeedParams):
    """OneCycle: up and down once, then decay (Smith 2018, arXiv:1803.09820); momentum goes the other way."""

    cycle_min_lr: Rates
    """Learning rate at both ends of the cycle; a list has one for each param group."""

    cycle_max_lr: Rates
    """Learning rate in the middle of the cycle; a list has one for each param group."""

    decay_lr_rate: float = 0.0
    """After the cycle the rate is cycle_min_lr / (1 + this x intervals of decay_step_size); 0: it stays."""

    cycle_first_step_size: Count = 2000
    """Optimizer steps up."""

    cycle_second_step_size: WholeNumber | None = None
    """Optimizer steps down; null: as many as up."""

    cycle_first_stair_count: WholeNumber = 0
    """Stairs on the way up; 0: a straight line."""

    cycle_second_stair_count: WholeNumber | None = None
    """Stairs on the way down; null: as many as up; 0: a straight line."""

    decay_step_size: WholeNumber = 0
    """Optimizer steps of one interval of decay after the cycle; 0: no decay."""

    cycle_momentum: bool = True
    """Momentum goes from cycle_max_mom down to cycle_min_mom and back, against the rate. It is the first of `betas`;
    the second becomes 0.99, as in DeepSpeed. An optimizer without betas keeps its momentum."""

    cycle_min_mom: Rates = 0.8
    """Momentum in the middle of the cycle; a list has one for each param group."""

    cycle_max_mom: Rates = 0.9
    """Momentum at both ends of the cycle; a list has one for each param group."""

    decay_mom_rate: float = 0.0
    """After the cycle momentum is cycle_max_mom x (1 + this x intervals of decay_step_size); 0: it stays."""


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
    """The schedule and its keywords. It is stepped inside engine.step(), after each optimizer step."""

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
        raise complaint(f"unknown scheduler type {in_json(name)}", meant)

    @classmethod
    def section_of(cls, key: str, tree: Mapping[str, Any]) -> ParamsClass | None:
        return PARAMS.get(str(tree.get("type"))) if key == "params" else None

    @classmethod
    def sections_of(cls, key: str) -> tuple[ParamsClass, ...]:
        return tuple(PARAMS.values()) if key == "params" else ()
