"""The training engine: DeepSpeed's API, its assembly from the other packages, and checkpointing."""

from launcher.engine.engine import Engine

__all__ = ["Engine"]
