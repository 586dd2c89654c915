"""`deepspeed.runtime.lr_schedules`: the five schedules as classes, with the keywords of `scheduler.params`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer

from launcher.config import load
from launcher.errors import ConfigError
from launcher.optim.schedules import Schedule, deepspeed_schedule


class _OfTheJson(type):
    """A class of which a schedule is also an instance that the engine made, where the JSON names it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        made = isinstance(instance, Schedule) and instance.name
        return super().__instancecheck__(instance) or made == cls.__name__


class _Named(Schedule, metaclass=_OfTheJson):
    """A schedule by its name in the JSON.

    Args:
        optimizer: its param_groups are changed in place.
        positional: the values of `order`.
        keywords: as in `scheduler.params`; `verbose` is not needed.

    Raises:
        ConfigError: a keyword is not known, or a value is none that it can have.
    """

    order: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, optimizer: Optimizer, *positional: Any, verbose: bool = False, **keywords: Any
    ) -> None:
        keywords |= dict(zip(self.order, positional, strict=False))
        name = next(cls.__name__ for cls in type(self).__mro__ if _Named in cls.__bases__)
        if keywords.get("warmup_num_steps", 0) is None:
            raise ConfigError(
                "warmup_num_steps is None", where=f"{name}()", fix="give a number of steps, or leave it out"
            )
        given = {key: value for key, value in keywords.items() if value is not None}
        json = {"train_batch_size": 1, "scheduler": {"type": name, "params": given}}
        config = load(json, where=f"{name}()").scheduler
        assert config is not None
        super().__init__(optimizer, *deepspeed_schedule(config.params, optimizer))


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
