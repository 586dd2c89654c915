"""`timers`: the line about samples per second."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from launcher.config.section import Section


class ThroughputConfig(Section):
    """Sequences per second, from the start of the first forward to the end of the optimizer step."""

    enabled: bool = True
    """Print them with the lines of `steps_per_print`: of the last step, and the mean but for the first two steps."""

    synchronized: bool = True
    """Wait for the device at both ends; false measures how fast work is handed to it."""

    differs: ClassVar[dict[str, str]] = {
        "enabled": "nothing is measured, nor waited for, where `steps_per_print` asks for no line"
    }


class TimersConfig(Section):
    """Timers."""

    throughput: ThroughputConfig = Field(default_factory=ThroughputConfig.model_construct)
    """Sequences per second."""
