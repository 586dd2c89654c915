"""Schedules as data: for each rank a list of actions. No torch."""

from launcher.pipeline.schedules.asynchronous import DRAINED
from launcher.pipeline.schedules.registry import ONE_STAGE, SCHEDULES, schedule

__all__ = ["DRAINED", "ONE_STAGE", "SCHEDULES", "schedule"]
