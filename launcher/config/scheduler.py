"""`scheduler`: the learning-rate schedule over optimizer steps, one of DeepSpeed's or of torch's.

DeepSpeed's five schedules are implemented in `launcher/optim/schedules.py`. The others are torch's classes,
stepped after each optimizer step: torch's epoch is an optimizer step here, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from launcher.config.problems import in_json, nearest
from launcher.config.section import Count, Rate, Rates, Section, WholeNumber, complaint, whole, wholes


class SchedulerParams(Section):
    """Keywords of a schedule."""


Positive = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _is_start(epoch: int) -> int:
    if epoch != -1:
        what = f"{epoch} needs an `initial_lr` in every param group, which a new optimizer does not have"
        raise complaint(what, "delete it; checkpoints save the position of the schedule")
    return epoch


class TorchParams(SchedulerParams):
    """The key shared by torch's schedules."""

    last_epoch: Annotated[int, BeforeValidator(whole), AfterValidator(_is_start)] = -1
    """Only -1 (the start) is accepted: checkpoints save the position."""

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of torch's class."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "last_epoch"}


class StepLRParams(TorchParams):
    """StepLR: multiply by gamma every `step_size` optimizer steps."""

    step_size: Count
    """Optimizer steps between two changes."""

    gamma: Positive = 0.1
    """Factor of each change."""


class MultiStepLRParams(TorchParams):
    """MultiStepLR: multiply by gamma at each milestone."""

    milestones: Annotated[tuple[int, ...], BeforeValidator(wholes(0, "optimizer steps", [100, 200]))]
    """Optimizer steps at which the rate changes."""

    gamma: Positive = 0.1
    """Factor of each change."""


class ConstantLRParams(TorchParams):
    """ConstantLR: multiply by factor for the first `total_iters` optimizer steps."""

    factor: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    """Factor of the first steps, above 0, at most 1."""

    total_iters: Count = 5
    """Optimizer steps with the factor."""


class LinearLRParams(TorchParams):
    """LinearLR: the factor changes linearly from start to end."""

    start_factor: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    """Factor at the start, above 0, at most 1."""

    end_factor: Fraction = 1.0
    """Factor at the end, 0 to 1."""

    total_iters: Count = 5
    """Optimizer steps from start to end."""


class ExponentialLRParams(TorchParams):
    """ExponentialLR: multiply by gamma at every optimizer step."""

    gamma: Positive
    """Factor of each step."""


class CosineAnnealingLRParams(TorchParams):
    """CosineAnnealingLR: half a cosine from the optimizer's rate to `eta_min`, then up again (arXiv:1608.03983)."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"T_max"})

    T_max: Count
    """Optimizer steps in half a cosine."""

    eta_min: Rate = 0.0
    """Lowest rate."""


class CosineAnnealingWarmRestartsParams(TorchParams):
    """CosineAnnealingWarmRestarts: half a cosine down, then again from the top (arXiv:1608.03983)."""

    T_0: Count
    """Optimizer steps in the first cosine."""

    T_mult: Count = 1
    """Length of each cosine as a multiple of the one before."""

    eta_min: Rate = 0.0
    """Lowest rate."""


class CyclicLRParams(TorchParams):
    """CyclicLR: repeated cycles between two rates (Smith 2015, arXiv:1506.01186)."""

    base_lr: Rates
    """Lower rate; a list has one for each param group."""

    max_lr: Rates
    """Upper rate; a list has one for each param group."""

    step_size_up: Count = 2000
    """Optimizer steps up."""

    step_size_down: Count | None = None
    """Optimizer steps down; null: as many as up."""

    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    """Amplitude of the cycles: constant, halved in each cycle, or multiplied by gamma in each step."""

    gamma: Positive = 1.0
    """Factor of "exp_range"."""

    scale_mode: Literal["cycle", "iterations"] = "cycle"
    """Argument of `scale_fn`, a function that JSON cannot hold; `mode` alone determines the amplitude."""

    cycle_momentum: bool = True
    """Vary the momentum (or the first of betas) inversely to the rate."""

    base_momentum: Fraction = 0.8
    """Momentum where the rate is highest."""

    max_momentum: Fraction = 0.9
    """Momentum where the rate is lowest."""

    without_effect: ClassVar[dict[str, str]] = {
        "scale_mode": "it applies only to `scale_fn`, a function, which JSON cannot hold"
    }


class OneCycleLRParams(TorchParams):
    """OneCycleLR: up to `max_lr` and down to almost nothing (Smith 2018, arXiv:1803.09820)."""

    max_lr: Rates
    """Highest rate; a list has one for each param group."""

    total_steps: Count | None = None
    """Optimizer steps of the run; torch raises at the step after them. Null: epochs x steps_per_epoch."""

    epochs: Count | None = None
    """Epochs of the run, if total_steps is null."""

    steps_per_epoch: Count | None = None
    """Optimizer steps per epoch, if total_steps is null."""

    pct_start: Fraction = 0.3
    """Share of the steps in which the rate rises."""

    anneal_strategy: Literal["cos", "linear"] = "cos"
    """Shape of both halves."""

    cycle_momentum: bool = True
    """Vary the momentum (or the first of betas) inversely to the rate."""

    base_momentum: Rates = 0.85
    """Momentum where the rate is highest; a list has one for each param group."""

    max_momentum: Rates = 0.95
    """Momentum where the rate is lowest; a list has one for each param group."""

    div_factor: Annotated[float, Field(gt=0)] = 25.0
    """The first rate is max_lr divided by this."""

    final_div_factor: Annotated[float, Field(gt=0)] = 1e4
    """The last rate is the first divided by this."""

    three_phase: bool = False
    """Add a third phase: fall as far as the rate rose, then fall to the last rate."""


class PolynomialLRParams(TorchParams):
    """PolynomialLR: polynomial decay to 0."""

    total_iters: Count = 5
    """Optimizer steps to 0."""

    power: Positive = 1.0
    """The power; 1 is linear."""


TORCH: dict[str, type[TorchParams]] = {
    "StepLR": StepLRParams,
    "MultiStepLR": MultiStepLRParams,
    "ConstantLR": ConstantLRParams,
    "LinearLR": LinearLRParams,
    "ExponentialLR": ExponentialLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "CyclicLR": CyclicLRParams,
    "OneCycleLR": OneCycleLRParams,
    "PolynomialLR": PolynomialLRParams,
}
"""Class of torch.optim.lr_scheduler -> its keywords."""

NEED_PYTHON: dict[str, str] = {
    "LambdaLR": "needs a Python function",
    "MultiplicativeLR": "needs a Python function",
    "SequentialLR": "needs schedules built in Python",
    "ChainedScheduler": "needs schedules built in Python",
    "ReduceLROnPlateau": "needs a metric at each step, which only the training loop has",
}
"""Classes of torch.optim.lr_scheduler that JSON cannot express -> why."""


class DeepSpeedParams(SchedulerParams):
    """The key shared by DeepSpeed's schedules."""

    last_batch_iteration: Annotated[int, BeforeValidator(whole), Field(ge=-1)] = -1
    """Iteration to resume from; -1 is the start. Otherwise the first optimizer step uses the optimizer's own
    rate, and the next one the rate of the iteration after this one. Checkpoints save the position."""


class WarmupParams(DeepSpeedParams):
    """Keys shared by all warm-up schedules."""

    warmup_num_steps: WholeNumber = 1000
    """Warm-up steps; 0 and 1 are treated as 2, as in DeepSpeed."""

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
    """WarmupCosineLR: warm-up, then half a cosine down, as ratios of the optimizer's learning rate."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"total_num_steps"})

    total_num_steps: Count
    """Optimizer step at which the cosine ends."""

    warmup_min_ratio: Rate = 0.0
    """Ratio at the start."""

    cos_min_ratio: Rate = 1e-4
    """Ratio at the end."""


class LRRangeTestParams(DeepSpeedParams):
    """LRRangeTest: the rate grows without limit, to find the largest usable one (Smith 2018,
    arXiv:1803.09820)."""

    lr_range_test_min_lr: Rates = 1e-3
    """Learning rate at the start; a list has one for each param group."""

    lr_range_test_step_size: Count = 2000
    """Optimizer steps in which the rate grows by `lr_range_test_step_rate` times the initial one."""

    lr_range_test_step_rate: float = 1.0
    """Growth in `lr_range_test_step_size` steps, as a multiple of the first rate."""

    lr_range_test_staircase: bool = False
    """Grow once every `lr_range_test_step_size` steps, not at each."""


class OneCycleParams(DeepSpeedParams):
    """OneCycle: up and down once, then decay (Smith 2018, arXiv:1803.09820); momentum moves inversely."""

    cycle_min_lr: Rates
    """Learning rate at both ends of the cycle; a list has one for each param group."""

    cycle_max_lr: Rates
    """Learning rate in the middle of the cycle; a list has one for each param group."""

    decay_lr_rate: float = 0.0
    """After the cycle, the rate is cycle_min_lr / (1 + this x intervals of decay_step_size); 0: constant."""

    cycle_first_step_size: Count = 2000
    """Optimizer steps up."""

    cycle_second_step_size: WholeNumber | None = None
    """Optimizer steps down; null: as many as up."""

    cycle_first_stair_count: WholeNumber = 0
    """Number of stairs on the way up; 0: linear."""

    cycle_second_stair_count: WholeNumber | None = None
    """Number of stairs on the way down; null: as many as up; 0: linear."""

    decay_step_size: WholeNumber = 0
    """Optimizer steps per interval of decay after the cycle; 0: no decay."""

    cycle_momentum: bool = True
    """Vary the momentum from cycle_max_mom down to cycle_min_mom and back, inversely to the rate. It is the
    first of `betas`; the second becomes 0.99, as in DeepSpeed. An optimizer without betas keeps its
    momentum."""

    cycle_min_mom: Rates = 0.8
    """Momentum in the middle of the cycle; a list has one for each param group."""

    cycle_max_mom: Rates = 0.9
    """Momentum at both ends of the cycle; a list has one for each param group."""

    decay_mom_rate: float = 0.0
    """After the cycle, momentum is cycle_max_mom x (1 + this x intervals of decay_step_size); 0: constant."""


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
