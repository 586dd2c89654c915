"""`deepspeed.runtime.data_pipeline.curriculum_scheduler`: the difficulty of each step, as configured.

The engine applies its own curriculum if `data_efficiency` is configured. Source: Li et al. 2022,
arXiv:2108.06084.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.engine.curriculum import rising, stepped
from launcher.errors import ConfigError

KINDS = ("fixed_discrete", "fixed_linear", "fixed_root", "custom")


class CurriculumScheduler:
    """Computes the difficulty of each optimizer step.

    Args:
        config: min_difficulty, max_difficulty, schedule_type and schedule_config, as in the JSON.

    Raises:
        ConfigError: a required key is missing, or `schedule_type` is unknown.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("schedule_type")
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if key not in config:
                raise ConfigError(
                    f"the curriculum requires {key}", where="CurriculumScheduler()", fix=f"add {key}"
                )
        if kind not in KINDS:
            raise ConfigError(
                f"unknown schedule_type {kind!r}",
                where="CurriculumScheduler()",
                fix=f"use one of {', '.join(KINDS)}",
            )
        pace = dict(config.get("schedule_config", {}))
        for key in _needed(kind):
            if key not in pace:
                raise ConfigError(
                    f"schedule_config of {kind} requires {key}",
                    where="CurriculumScheduler()",
                    fix=f"add {key}",
                )
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
            "schedule_config": pace,
        }
        self.custom_get_difficulty: Callable[[int], int] | None = None

    def get_current_difficulty(self) -> int:
        return int(self.state["current_difficulty"])

    def set_current_difficulty(self, difficulty: int) -> None:
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of the "custom" schedule: optimizer step -> difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_difficulty(self, global_steps: int) -> int:
        """Return the difficulty of an optimizer step; steps count from 1."""
        pace, low, high = (
            self.state["schedule_config"],
            self.state["min_difficulty"],
            self.state["max_difficulty"],
        )
        kind = self.state["schedule_type"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise ConfigError(
                    "the custom schedule has no difficulty function",
                    fix="call set_custom_get_difficulty(function) first",
                )
            return self.custom_get_difficulty(global_steps)
        if kind == "fixed_discrete":
            return stepped(global_steps, pace["difficulty"], pace["max_step"], high)
        degree = pace.get("root_degree", 1) if kind == "fixed_root" else 1
        return rising(global_steps, low, high, pace["total_curriculum_step"], pace["difficulty_step"], degree)

    def update_difficulty(self, global_steps: int) -> int:
        """Update and return the difficulty for this step; once it reaches the maximum it stays there."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.get_current_difficulty()


def _needed(kind: str) -> tuple[str, ...]:
    if kind == "custom":
        return ()
    if kind == "fixed_discrete":
        return "difficulty", "max_step"
    more = ("root_degree",) if kind == "fixed_root" else ()
    return "total_curriculum_step", "difficulty_step", *more
