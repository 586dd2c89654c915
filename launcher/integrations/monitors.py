"""`deepspeed.monitor`: metric writers as configured, together or separately, for use without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.distributed as dist

from launcher.config.section import Section
from launcher.integrations.configuration import DeepSpeedConfig
from launcher.integrations.sections import MONITORS, DeepSpeedMonitorConfig
from launcher.monitor import writers
from launcher.monitor.writers import Monitor

__all__ = ["Monitor"]


class MonitorMaster(Monitor):
    """Writes (name, value, samples) to TensorBoard, CSV files, Weights & Biases and Comet, on rank 0 only.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`, or the config's monitor sections as a dict.
    """

    def __init__(self, monitor_config: DeepSpeedConfig | DeepSpeedMonitorConfig | Mapping[str, Any]) -> None:
        if isinstance(monitor_config, DeepSpeedConfig):
            monitor_config = monitor_config.monitor_config
        if isinstance(monitor_config, Mapping):
            sections = {name: monitor_config[name] for name in MONITORS if name in monitor_config}
            monitor_config = DeepSpeedMonitorConfig(**sections)
        on = {name: getattr(monitor_config, name) for name in MONITORS}
        on = {name: section.to_dict() for name, section in on.items() if section.enabled}
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(writers.open_writers(on) if rank == 0 else (), enabled=bool(on))


class _One(MonitorMaster):
    """A monitor with a single writer.

    Args:
        section: its config section; the keys are available as attributes.
    """

    name: ClassVar[str]

    def __init__(self, section: Section | Mapping[str, Any]) -> None:
        given = section.given() if isinstance(section, Section) else section
        config = DeepSpeedMonitorConfig(**{self.name: given})
        super().__init__(config)
        self._section = getattr(config, self.name)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return getattr(self._section, key)


class TensorBoardMonitor(_One):
    """TensorBoard files."""

    name = "tensorboard"


class csvMonitor(_One):  # DeepSpeed's name
    """CSV files."""

    name = "csv_monitor"


class WandbMonitor(_One):
    """Weights & Biases."""

    name = "wandb"


class CometMonitor(_One):
    """Comet."""

    name = "comet"
