"""`deepspeed.runtime.lr_schedules`: the five schedules as classes, with `scheduler.params` as keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch.optim import Optimizer

from launcher.config import DeepSpeedParams, OneCycleParams, load
from launcher.errors import ConfigError
from launcher.optim.curves import per_group
from launcher.optim.schedules import SECOND_BETA, Schedule, deepspeed_schedule


class _OfTheJson(type):
    """Metaclass: the engine's own schedule is also an instance of the class that `scheduler.type` names."""

    def __instancecheck__(cls, instance: Any) -> bool:
        made = isinstance(instance, Schedule) and instance.name
        return super().__instancecheck__(instance) or made == cls.__name__


class _Named(Schedule, metaclass=_OfTheJson):
    """A schedule whose class name is its `scheduler.type`.

    Args:
        optimizer: its param_groups are modified in place.
        positional: values of the keywords in `order`.
        keywords: as in `scheduler.params`; `verbose` is ignored.

    Raises:
        ConfigError: a keyword is unknown, or its value is invalid.
    """

    order: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, optimizer: Optimizer, *positional: Any, verbose: bool = False, **keywords: Any
    ) -> None:
        keywords |= dict(zip(self.order, positional, strict=False))
        name = next(cls.__name__ for cls in type(self).__mro__ if _Named in cls.__bases__)
        if keywords.get("warmup_num_steps", 0) is None:
            raise ConfigError(
                "warmup_num_steps is None", where=f"{name}()", fix="pass a number of steps, or omit it"
            )
        given = {key: value for key, value in keywords.items() if value is not None}
        json = {"train_batch_size": 1, "scheduler": {"type": name, "params": given}}
        config = load(json, where=f"{name}()").scheduler
        assert config is not None and isinstance(config.params, DeepSpeedParams)
        super().__init__(optimizer, *deepspeed_schedule(config.params, optimizer))
        self.params = config.params


class WarmupLR(_Named):
    order = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")


class WarmupDecayLR(_Named):
    order = ("total_num_steps", *WarmupLR.order)


class WarmupCosineLR(_Named):
    order = ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type")


class OneCycle(_Named):
    order = ("cycle_min_lr", "cycle_max_lr")


class LRRangeTest(_Named):
    order = (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
    )


# ---- attributes -----------------------------------------------------------------------------------


def _of_groups(low_or_high: str, what: str) -> Callable[[Schedule], list[float]]:
    """Return a getter of the per-group values of a keyword such as `warmup_max_lr` or `cycle_max_mom`."""

    def ask(schedule: Schedule) -> list[float]:
        prefix = "cycle" if isinstance(schedule.params, OneCycleParams) else "warmup"
        key = f"{prefix}_{low_or_high}_{what}"
        return per_group(key, getattr(schedule.params, key), schedule.base_lrs)

    return ask


def _moms(low_or_high: str) -> Callable[[Schedule], list[tuple[float, float]]]:
    return lambda schedule: [(mom, SECOND_BETA) for mom in _of_groups(low_or_high, "mom")(schedule)]


def _halves(schedule: Schedule) -> tuple[int, int]:
    params: Any = schedule.params
    first, second = params.cycle_first_step_size, params.cycle_second_step_size
    return first, first if second is None else second


def _ratio(schedule: Schedule) -> float:
    """Return the ratio of the current to the initial learning rate."""
    rates = zip(schedule.get_lr(), schedule.base_lrs, strict=True)
    return next((lr / base for lr, base in rates if base), 0.0)


def _keyword(name: str) -> Callable[[Schedule], Any]:
    return lambda schedule: getattr(schedule.params, name)


ATTRIBUTES: Mapping[str, Callable[[Schedule], Any]] = {
    **{
        name: _keyword(name)
        for name in ("warmup_type", "warmup_min_ratio", "cos_min_ratio", "total_num_steps", "cycle_momentum")
    },
    **{name: _keyword(name) for name in ("decay_lr_rate", "decay_mom_rate", "decay_step_size")},
    "warmup_num_steps": lambda schedule: max(2, _keyword("warmup_num_steps")(schedule)),
    "min_lrs": _of_groups("min", "lr"),
    "max_lrs": _of_groups("max", "lr"),
    "min_moms": _moms("min"),
    "max_moms": _moms("max"),
    "first_step_size": lambda schedule: _halves(schedule)[0],
    "second_step_size": lambda schedule: _halves(schedule)[1],
    "total_size": lambda schedule: sum(_halves(schedule)),
    "step_ratio": lambda schedule: _halves(schedule)[0] / sum(_halves(schedule)),
    "step_size": _keyword("lr_range_test_step_size"),
    "step_rate": _keyword("lr_range_test_step_rate"),
    "staircase": _keyword("lr_range_test_staircase"),
    "org_lrs": lambda schedule: list(schedule.base_lrs),
}
"""Read-only attributes of DeepSpeed's schedules: setting one is an error, as the curve would not change."""

for _name, _answer in ATTRIBUTES.items():
    setattr(Schedule, _name, property(_answer))
setattr(Schedule, "get_lr_ratio", _ratio)  # noqa: B010
