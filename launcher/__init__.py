"""Trains Hugging Face models from a DeepSpeed-style JSON, with its own ZeRO stages 0-3.

    import launcher
    engine, optimizer, _, scheduler = launcher.initialize(model=model, config="ds_config.json")

Importing this package does not import torch; the first access to one of its names does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "initialize": "launcher.engine.assemble",
    "Engine": "launcher.engine",
    "init_distributed": "launcher.comm",
    "add_config_arguments": "launcher.arguments",
    "checkpointing": "launcher.checkpointing",
    "pipe": "launcher.pipe",
    "zero": "launcher.zero",
}

__all__ = [
    "Engine",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "pipe",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'launcher' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}"
        )
    module = import_module(_HOMES[name])
    value = module if name in ("checkpointing", "pipe", "zero") else getattr(module, name)
    globals()[name] = value
    return value
