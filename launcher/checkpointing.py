"""`launcher.checkpointing`: activation checkpointing for models that ask for it themselves.

DeepSpeed's module `deepspeed.checkpointing`, by its names; it runs what `activation_checkpointing` runs for blocks.

    launcher.checkpointing.configure(mpu_=None, deepspeed_config="ds_config.json")
    hidden = launcher.checkpointing.checkpoint(block, hidden)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.comm import Axis
from launcher.config import ActivationCheckpointingConfig, Config, load
from launcher.errors import ConfigError
from launcher.models.activation import Checkpointer

logger = logging.getLogger("launcher")
_checkpointer: Checkpointer | None = None
_arguments: dict[str, Any] = {}
KEYS: Mapping[str, str] = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}
"""Argument of `configure` -> key of the section."""
unit: Any = None
"""The model-parallel unit that `configure` was given."""


def configure(
    mpu_: Any = None,
    deepspeed_config: str | Path | Mapping[str, Any] | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how `checkpoint` keeps inputs. Arguments that are given beat the JSON.

    Args:
        mpu_: has get_model_parallel_group, _rank and _world_size; without it nothing is split over ranks.
        deepspeed_config: its section `activation_checkpointing` is read.
        partition_activations, checkpoint_in_cpu, synchronize, profile: the keys of the section.
        contiguous_checkpointing: the key contiguous_memory_optimization; needs num_checkpoints.
        num_checkpoints: calls of `checkpoint` in one forward.

    Raises:
        ConfigError: an argument is not valid for its key; contiguous_checkpointing without num_checkpoints. What
            was configured before then stays.
    """
    arguments = {key: value for key, value in locals().items() if value is not None}
    global _checkpointer, _arguments, unit
    section = _section(deepspeed_config, {KEYS[name]: arguments[name] for name in KEYS if name in arguments})
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        raise ConfigError(
            "a single buffer for the saved inputs needs their number",
            where="checkpointing.configure()",
            fix="pass num_checkpoints=N: the calls of checkpoint() in one forward",
        )
    if section.partition_activations and mpu_ is None:
        logger.warning(
            "checkpointing.configure(): partition_activations splits inputs over model-parallel ranks; "
            "without mpu_ these ranks are unknown, so each rank keeps its inputs whole"
        )
    _checkpointer = Checkpointer.of(section, _axis(mpu_), section.number_checkpoints or 0)
    _arguments, unit = arguments, mpu_


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Call `configure` again, with this `partition_activations`."""
    configure(**{**_arguments, "partition_activations": partition_activation})


def set_num_layers(nlayers: int) -> None:
    """Call `configure` again, with this `num_checkpoints`."""
    configure(**{**_arguments, "num_checkpoints": nlayers})


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _checkpointer is not None


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args); only `args` are kept, and it runs again in backward, with the same random numbers.

    Inside a block that the JSON's section checkpoints, it only calls the function.
    """
    if _checkpointer is None:
        configure()
    assert _checkpointer is not None
    return _checkpointer.run(getattr(function, "__qualname__", type(function).__name__), function, *args)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Make a new buffer for the saved inputs at the next forward, for example when their size has changed."""
    if _checkpointer is not None:
        _checkpointer.saved.reset()


def _section(config: Any, arguments: Mapping[str, Any]) -> ActivationCheckpointingConfig:
    """Return the JSON's section with the arguments in it, checked as a whole."""
    loaded = config if isinstance(config, Config) or config is None else load(config)
    written = loaded.activation_checkpointing.given() if loaded and loaded.activation_checkpointing else {}
    tree = {"activation_checkpointing": {**written, **arguments}}
    checked = load(tree, where="checkpointing.configure()").activation_checkpointing
    assert checked is not None  # it was written
    return checked


def _axis(mpu: Any) -> Axis:
    degree = 1 if mpu is None else int(mpu.get_model_parallel_world_size())
    if degree == 1:
        return Axis("tp")
    return Axis.over("tp", mpu.get_model_parallel_group())
