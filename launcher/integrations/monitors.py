"""`deepspeed.monitor.monitor.MonitorMaster`: the writers of metrics that a JSON names, without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from launcher.config import load
from launcher.integrations.configuration import MONITORS, DeepSpeedConfig
from launcher.monitor import writers
from launcher.monitor.writers import Monitor

__all__ = ["Monitor"]


class MonitorMaster(Monitor):
    """Sends (name, value, samples) to TensorBoard, CSV files, Weights & Biases and Comet. Rank 0 writes.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`, or the JSON's sections as a dict.
    """

    def __init__(self, monitor_config: DeepSpeedConfig | Mapping[str, Any]) -> None:
        sections = (
            monitor_config.monitor_config if isinstance(monitor_config, DeepSpeedConfig) else monitor_config
        )
        json = {"train_batch_size": 1, **{name: sections[name] for name in MONITORS if name in sections}}
        config = load(json, where="MonitorMaster()")
        on = {name: getattr(config, name).to_dict() for name in MONITORS if getattr(config, name).enabled}
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(writers.open_writers(on) if rank == 0 else (), enabled=bool(on))
