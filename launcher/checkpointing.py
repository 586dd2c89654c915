"""`launcher.checkpointing`: activation checkpointing for models that call it in their own code.

Drop-in replacement for `deepspeed.checkpointing`; shares its implementation with `activation_checkpointing`.

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
"""Argument of `configure` -> key of the `activation_checkpointing` section."""
unit: Any = None
"""The model-parallel unit (mpu) passed to `configure`."""


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
    """Set how `checkpoint` stores the inputs that it saves. Explicit arguments override the config.

    Args:
        mpu_: has get_model_parallel_group, _rank and _world_size; without it inputs are not partitioned over
            ranks.
        deepspeed_config: only its `activation_checkpointing` section is read.
        partition_activations, checkpoint_in_cpu, synchronize, profile: see the keys of the section.
        contiguous_checkpointing: the key contiguous_memory_optimization; requires num_checkpoints.
        num_checkpoints: number of calls to `checkpoint` in one forward.

    Raises:
        ConfigError: an argument is not valid for its key, or contiguous_checkpointing is set without
            num_checkpoints. The previous configuration stays in effect.
    """
    arguments = {key: value for key, value in locals().items() if value is not None}
    global _checkpointer, _arguments, unit
    section = _section(deepspeed_config, {KEYS[name]: arguments[name] for name in KEYS if name in arguments})
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        raise ConfigError(
            "contiguous checkpointing needs the number of checkpoints",
            where="checkpointing.configure()",
            fix="pass num_checkpoints=N, the number of checkpoint() calls in one forward",
        )
    if section.partition_activations and mpu_ is None:
        logger.warning(
            "checkpointing.configure(): partition_activations splits inputs over model-parallel ranks; "
            "without mpu_ these ranks are unknown, so each rank keeps its full inputs"
        )
    _checkpointer = Checkpointer.of(section, _axis(mpu_), section.number_checkpoints or 0)
    _arguments, unit = arguments, mpu_


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Call `configure` again with this value of `partition_activations`."""
    configure(**{**_arguments, "partition_activations": partition_activation})


def set_num_layers(nlayers: int) -> None:
    """Call `configure` again with this value of `num_checkpoints`."""
    configure(**{**_arguments, "num_checkpoints": nlayers})


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _checkpointer is not None


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), saving only `args`; backward reruns it with the same random state.

    Inside a block that is already checkpointed by `activation_checkpointing`, this only calls the function.
    """
    if _checkpointer is None:
        configure()
    assert _checkpointer is not None
    return _checkpointer.run(getattr(function, "__qualname__", type(function).__name__), function, *args)


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Allocate a new buffer for the saved inputs at the next forward, for example after a size change."""
    if _checkpointer is not None:
        _checkpointer.saved.reset()


def _section(config: Any, arguments: Mapping[str, Any]) -> ActivationCheckpointingConfig:
    """Return the config's section, overridden by the arguments and validated."""
    loaded = config if isinstance(config, Config) or config is None else load(config)
    written = loaded.activation_checkpointing.given() if loaded and loaded.activation_checkpointing else {}
    tree = {"activation_checkpointing": {**written, **arguments}}
    checked = load(tree, where="checkpointing.configure()").activation_checkpointing
    assert checked is not None  # the tree above contains it
    return checked


def _axis(mpu: Any) -> Axis:
    degree = 1 if mpu is None else int(mpu.get_model_parallel_world_size())
    if degree == 1:
        return Axis("tp")
    return Axis.over("tp", mpu.get_model_parallel_group())
