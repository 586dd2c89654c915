"""`scheduler`: how the learning rate moves over optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator

from launcher.config.problems import show
from launcher.config.section import Count, Remark, Section, complaint, whole
from launcher.config.suggest import nearest

Rate = Annotated[float, Field(ge=0)]


class SchedulerParams(Section):
    """Keys that every warm-up schedule has."""

    warmup_num_steps: Count = 1000
    """Optimizer steps of warm-up; DeepSpeed takes at least 2."""

    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warm-up. Log is DeepSpeed's default: steep at first."""

    last_batch_iteration: Annotated[int, BeforeValidator(whole), Field(ge=-1)] = -1
    """Optimizer step to go on from; -1 is the start."""


class WarmupLRParams(SchedulerParams):
    """WarmupLR: from min to max, then constant."""

    warmup_min_lr: Rate = 0.0
    """Learning rate at the start."""

    warmup_max_lr: Rate | None = None
    """Learning rate after the warm-up; null: the optimizer's."""


class WarmupDecayLRParams(SchedulerParams):
    """WarmupDecayLR: from min to max, then linearly to 0."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"total_num_steps"})

    total_num_steps: Count
    """Optimizer step at which the learning rate is 0."""

    warmup_min_lr: Rate = 0.0
    """Learning rate at the start."""

    warmup_max_lr: Rate = 1e-3
    """Learning rate after the warm-up."""


class WarmupCosineLRParams(SchedulerParams):
    """WarmupCosineLR: ratios of the optimizer's learning rate; up, then down along half a cosine."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"total_num_steps"})

    total_num_steps: Count
    """Optimizer step at which the cosine ends."""

    warmup_min_ratio: Rate = 0.0
    """Ratio at the start."""

    cos_min_ratio: Rate = 1e-4
    """Ratio at the end."""


PARAMS: dict[str, type[SchedulerParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
"""Type -> its params."""

NOT_YET: tuple[str, ...] = (
    "LRRangeTest",
    "OneCycle",
    "LambdaLR",
    "MultiplicativeLR",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "SequentialLR",
    "CosineAnnealingLR",
    "ChainedScheduler",
    "ReduceLROnPlateau",
    "CyclicLR",
    "CosineAnnealingWarmRestarts",
    "OneCycleLR",
    "PolynomialLR",
)
"""DeepSpeed's other types and the classes of torch.optim.lr_scheduler."""


ParamsClass: TypeAlias = type[SchedulerParams]


class SchedulerConfig(Section):
    """Which schedule, and its keywords."""

    type: str
    """WarmupLR, WarmupDecayLR or WarmupCosineLR."""

    params: SchedulerParams
    """Keywords of the schedule; the class follows from `type`."""

    @field_validator("type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        if name in PARAMS:
            return name
        if name in NOT_YET:
            raise complaint(f"the schedule {name} is not implemented here yet", f"use {' or '.join(PARAMS)}")
        near = nearest(name, PARAMS)
        meant = f'did you mean "{near}"?' if near else f"use one of {', '.join(PARAMS)}"
        raise complaint(f"there is no schedule {show(name)}", meant)

    @classmethod
    def section_of(cls, key: str, tree: Mapping[str, Any]) -> ParamsClass | None:
        return PARAMS.get(str(tree.get("type"))) if key == "params" else None

    @classmethod
    def sections_of(cls, key: str) -> tuple[ParamsClass, ...]:
        return tuple(PARAMS.values()) if key == "params" else ()

    def remarks(self) -> Iterator[Remark]:
        total = getattr(self.params, "total_num_steps", None)
        warmup = self.params.warmup_num_steps
        if isinstance(total, int) and isinstance(warmup, int) and total <= warmup:
            what = f"the warm-up of {warmup} steps is not over at total_num_steps {total}"
            yield Remark("params.warmup_num_steps", what)
