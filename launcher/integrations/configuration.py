"""`deepspeed.DeepSpeedConfig`: a validated configuration under the attribute names that scripts read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.cluster.secret import without_secrets
from launcher.config import Config, load
from launcher.config.problems import ConfigProblems, dotted
from launcher.config.source import read
from launcher.engine.config_getters import value_at
from launcher.engine.dtypes import DTYPES
from launcher.errors import ConfigError
from launcher.integrations.enumerations import DeepSpeedConfigError
from launcher.integrations.refused import NotHere, missing
from launcher.integrations.sections import MONITORS, DeepSpeedMonitorConfig, DeepSpeedZeroConfig

PATHS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "dataloader_drop_last",
            "disable_python_gc",
            "dump_state",
            "gradient_allreduce_op",
            "gradient_clipping",
            "gradient_predivide_factor",
            "log_level",
            "managed_gradient_accumulation",
            "memory_breakdown",
            "prescale_gradients",
            "steps_per_print",
            "wall_clock_breakdown",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        )
    },
    "data_efficiency_enabled": "data_efficiency.enabled",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_optimization_stage": "zero_optimization.stage",
}
"""Attribute -> config key."""

SECTIONS: Mapping[str, str] = {
    "activation_checkpointing_config": "activation_checkpointing",
    "aio_config": "aio",
    "bfloat16_config": "bf16",
    "checkpoint_config": "checkpoint",
    "comms_config": "comms_logger",
    "compile_config": "compile",
    "data_efficiency_config": "data_efficiency",
    "float16_config": "fp16",
    "flops_profiler_config": "flops_profiler",
    "pipeline": "pipeline",
    "tensor_parallel_config": "tensor_parallel",
    "timers_config": "timers",
}
"""Attribute -> config section, typed and frozen."""

DTYPE_KEYS: Mapping[str, str] = {
    "communication_data_type": "communication_data_type",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "seq_parallel_communication_data_type": "seq_parallel_communication_data_type",
    "torch_autocast_dtype": "torch_autocast.dtype",
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class DeepSpeedConfig:
    """A validated configuration, with batch sizes resolved for the data-parallel world size.

    Args:
        config: path, base64-encoded JSON, or dict.
        mpu: provides the data-parallel world size; None: derived from the config and the number of ranks.

    Raises:
        ConfigError: the config is invalid; every problem is listed.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any] | Config, mpu: Any = None, mesh_device: Any = None
    ) -> None:
        loaded = config if isinstance(config, Config) else _loaded(config)
        self._param_dict: dict[str, Any] = loaded.given()
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.world_size: int = (
            mpu.get_data_parallel_world_size() if mpu is not None else loaded.dp_degree(ranks)
        )
        self._config = loaded.resolve(dp_degree=self.world_size)
        for key in BATCH:
            setattr(self, key, getattr(self._config, key))

    @property
    def zero_config(self) -> DeepSpeedZeroConfig:
        return DeepSpeedZeroConfig(self._config.zero_optimization)

    @property
    def zero_enabled(self) -> bool:
        return int(self._config.zero_optimization.stage) > 0

    @property
    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.checkpoint.tag_validation != "Ignore"

    @property
    def checkpoint_tag_validation_fail(self) -> bool:
        return self._config.checkpoint.tag_validation == "Fail"

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """Return the monitor sections, for `MonitorMaster`."""
        return DeepSpeedMonitorConfig(**{name: getattr(self._config, name).given() for name in MONITORS})

    def __getattr__(self, name: str) -> Any:
        if name in PATHS:
            return value_at(self._config, PATHS[name])
        if name in SECTIONS:
            return getattr(self._config, SECTIONS[name])
        if name in DTYPE_KEYS:
            found = value_at(self._config, DTYPE_KEYS[name])
            return DTYPES.get(found, found) if isinstance(found, str) else found
        if name.startswith("_"):
            raise AttributeError(name)
        what, how = missing(f"runtime.config.DeepSpeedConfig.{name}", f"DeepSpeedConfig.{name}")
        raise NotHere(what, **how)

    def print_user_config(self) -> None:
        """Print the JSON as it was written."""
        print(json.dumps(without_secrets(self._param_dict), indent=4, sort_keys=True, default=str))

    def print(self, name: str) -> None:
        """Print every key with its value."""
        print(f"{name}:")
        for key, value in sorted(without_secrets(self._config.to_dict()).items()):
            print(f"  {key} = {value}")


def _loaded(config: Any) -> Config:
    """Load the configuration. An error's first line lists its keys, for logs that show only that line."""
    try:
        return load(os.fspath(config) if isinstance(config, os.PathLike) else config)
    except ConfigProblems as error:
        keys = ", ".join(dict.fromkeys(dotted(problem.path) for problem in error.problems))
        raise DeepSpeedConfigError(f"Invalid {keys}: {error}") from None


def load_ds_config(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON as a dict, as it was written."""
    return dict(read(config).tree)


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the dict of a JSON object, for json.load(object_pairs_hook=...).

    Raises:
        ConfigError: a key occurs twice.
    """
    found = dict(ordered_pairs)
    if len(found) != len(ordered_pairs):
        keys = [key for key, _ in ordered_pairs]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        raise ConfigError(f"duplicate keys in the JSON: {', '.join(twice)}", fix="delete the duplicates")
    return found
