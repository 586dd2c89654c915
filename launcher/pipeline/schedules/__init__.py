"""Schedules as data: for each rank a list of actions. No torch."""

from launcher.pipeline.schedules.registry import ONE_STAGE, SCHEDULES, drained, schedule

__all__ = ["ONE_STAGE", "SCHEDULES", "drained", "schedule"]
