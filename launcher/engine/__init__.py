"""A model in training: DeepSpeed's surface over the packages, how they are put together, and what is saved of them."""

from launcher.engine.engine import Engine

__all__ = ["Engine"]
