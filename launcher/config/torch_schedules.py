"""Keywords of the schedules of torch.optim.lr_scheduler that a JSON can say. torch's own classes compute them.

They are stepped after each optimizer step: what torch calls an epoch is an optimizer step here, as in DeepSpeed.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from launcher.config.section import Section
from launcher.config.values import Count, Rate, Rates, complaint, whole, wholes


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
    """The key that torch's schedules share."""

    last_epoch: Annotated[int, BeforeValidator(whole), AfterValidator(_is_start)] = -1
    """Only -1, the start: checkpoints save the position."""

    def keywords(self) -> dict[str, Any]:
        """Return what torch's class is called with."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "last_epoch"}


class StepLRParams(TorchParams):
    """StepLR: times gamma every `step_size` optimizer steps."""

    step_size: Count
    """Optimizer steps between two changes."""

    gamma: Positive = 0.1
    """Factor of each change."""


class MultiStepLRParams(TorchParams):
    """MultiStepLR: times gamma at each milestone."""

    milestones: Annotated[tuple[int, ...], BeforeValidator(wholes(0, "optimizer steps", [100, 200]))]
    """Optimizer steps of the changes."""

    gamma: Positive = 0.1
    """Factor of each change."""


class ConstantLRParams(TorchParams):
    """ConstantLR: times factor for the first `total_iters` optimizer steps."""

    factor: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    """Factor of the first steps, above 0, at most 1."""

    total_iters: Count = 5
    """Optimizer steps with the factor."""


class LinearLRParams(TorchParams):
    """LinearLR: the factor goes from start to end along a line."""

    start_factor: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    """Factor at the start, above 0, at most 1."""

    end_factor: Fraction = 1.0
    """Factor at the end, 0 to 1."""

    total_iters: Count = 5
    """Optimizer steps from start to end."""


class ExponentialLRParams(TorchParams):
    """ExponentialLR: times gamma at every optimizer step."""

    gamma: Positive
    """Factor of each step."""


class CosineAnnealingLRParams(TorchParams):
    """CosineAnnealingLR: half a cosine from the optimizer's rate to `eta_min`, then up again (arXiv:1608.03983)."""

    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"T_max"})

    T_max: Count
    """Optimizer steps of half a cosine."""

    eta_min: Rate = 0.0
    """Lowest rate."""


class CosineAnnealingWarmRestartsParams(TorchParams):
    """CosineAnnealingWarmRestarts: half a cosine down, then again from the top (arXiv:1608.03983)."""

    T_0: Count
    """Optimizer steps of the first cosine."""

    T_mult: Count = 1
    """Length of each cosine as a multiple of the one before."""

    eta_min: Rate = 0.0
    """Lowest rate."""


class CyclicLRParams(TorchParams):
    """CyclicLR: up and down between two rates, again and again (Smith 2015, arXiv:1506.01186)."""

    base_lr: Rates
    """Lower rate; a list has one for each param group."""

    max_lr: Rates
    """Upper rate; a list has one for each param group."""

    step_size_up: Count = 2000
    """Optimizer steps up."""

    step_size_down: Count | None = None
    """Optimizer steps down; null: as many as up."""

    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    """Height of the cycles: the same, halved each time, or times gamma at each step."""

    gamma: Positive = 1.0
    """Factor of "exp_range"."""

    scale_mode: Literal["cycle", "iterations"] = "cycle"
    """What a `scale_fn` counts; a JSON cannot hold one, and `mode` decides by itself."""

    cycle_momentum: bool = True
    """Momentum (or the first of betas) goes the other way."""

    base_momentum: Fraction = 0.8
    """Momentum where the rate is highest."""

    max_momentum: Fraction = 0.9
    """Momentum where the rate is lowest."""

    without_effect: ClassVar[dict[str, str]] = {
        "scale_mode": "it belongs to `scale_fn`, a function, which JSON cannot hold"
    }


class OneCycleLRParams(TorchParams):
    """OneCycleLR: up to `max_lr` and down to almost nothing (Smith 2018, arXiv:1803.09820)."""

    max_lr: Rates
    """Highest rate; a list has one for each param group."""

    total_steps: Count | None = None
    """Optimizer steps of the run; torch raises at the step after them. Null: epochs x steps_per_epoch."""

    epochs: Count | None = None
    """Passes over the data, where total_steps is null."""

    steps_per_epoch: Count | None = None
    """Optimizer steps of a pass, where total_steps is null."""

    pct_start: Fraction = 0.3
    """Share of the steps that go up."""

    anneal_strategy: Literal["cos", "linear"] = "cos"
    """Shape of both halves."""

    cycle_momentum: bool = True
    """Momentum (or the first of betas) goes the other way."""

    base_momentum: Rates = 0.85
    """Momentum where the rate is highest; a list has one for each param group."""

    max_momentum: Rates = 0.95
    """Momentum where the rate is lowest; a list has one for each param group."""

    div_factor: Annotated[float, Field(gt=0)] = 25.0
    """The first rate is max_lr divided by this."""

    final_div_factor: Annotated[float, Field(gt=0)] = 1e4
    """The last rate is the first divided by this."""

    three_phase: bool = False
    """Down as far as it went up, then down to the last rate."""


class PolynomialLRParams(TorchParams):
    """PolynomialLR: down to 0 along a power."""

    total_iters: Count = 5
    """Optimizer steps to 0."""

    power: Positive = 1.0
    """The power; 1 is a line."""


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
"""Classes of torch.optim.lr_scheduler that a JSON cannot say -> why."""
