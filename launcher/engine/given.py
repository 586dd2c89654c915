"""Checks of the arguments of `initialize()`: the config, and model parallelism set up by the script (mpu)."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist
from torch import nn

from launcher.comm import Mesh
from launcher.config import Config, load
from launcher.errors import ArgumentsError, ConfigError

logger = logging.getLogger("launcher")

TENSOR = ("get_tensor_model_parallel_{}", "get_slice_parallel_{}", "get_model_parallel_{}")
STAGES = ("get_pipeline_model_parallel_{}", "get_pipe_parallel_{}")
SEQUENCE = ("get_sequence_parallel_{}",)
DATA = ("get_data_parallel_{}",)
"""Names of mpu getters in Megatron and DeepSpeed, newest first; {} is `world_size` or `rank`."""

WORDS = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "cp": "context-parallel ranks",
    "dp": "data-parallel ranks",
}
WHERE = "initialize(mpu=...)"


def loaded_config(args: Any, config: Any) -> Config:
    """Load and return the config; log notes on its keys on rank 0.

    Raises:
        ArgumentsError: the config is given twice or not at all.
        ConfigError: the config is invalid.
    """
    given = {"config=...": config}
    given |= {f"args.{name}": getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ArgumentsError(f"the config is given twice: {' and '.join(given)}", fix="pass it only once")
    if not given and (of_launch := os.environ.get("LAUNCHER_CONFIG")):
        if dist.get_rank() == 0:
            logger.info("initialize() without config: using the config of `launch --config`, %s", of_launch)
        given = {"launch --config": of_launch}
    if not given:
        raise ArgumentsError(
            "initialize() needs a config",
            fix="pass config=PATH or config={...}, or start the script with `launch --config PATH`",
        )
    config = next(iter(given.values()))
    if isinstance(config, Config):
        return config
    read = load(config)
    if dist.get_rank() == 0:
        tell(read)
    return read


def tell(config: Config) -> None:
    """Log the notes on a config: one warning for all keys without effect, the other notes at INFO."""
    idle = [note for note in config.notes if note.kind in ("no effect", "foreign")]
    if idle:
        lines = "".join(f"\n  {note}" for note in idle)
        logger.warning("config keys that have no effect:%s", lines)
    for note in config.notes:
        if note.kind not in ("no effect", "foreign", "comment"):
            logger.info("%s", note)


def check_mpu(mpu: Any, mesh: Mesh, model: nn.Module) -> None:
    """Check that the model parallelism set up by a script matches the config, rank by rank.

    Args:
        mpu: Megatron's module of that name, an object with the same getters, or None.

    Raises:
        ConfigError: a size or this rank's coordinate differs, or the layers are already split.
    """
    if mpu is None:
        return
    # sequence-parallel mpus call their sequence group "model-parallel"
    tensor = () if hasattr(mpu, "initialize_sequence_parallel") else TENSOR
    for key, names, axis in (
        ("tensor_parallel.autotp_size", tensor, mesh.axes["tp"]),
        ("pipeline.stages", STAGES, mesh.axes["pp"]),
        ("sequence_parallel_size", SEQUENCE, mesh.axes["cp"]),
        ("", DATA, mesh.dp),
    ):
        size, rank = _asked(mpu, names, "world_size"), _asked(mpu, names, "rank")
        if size is not None and size != axis.degree:
            here = f"the config sets {key} to {axis.degree}" if key else f"the mesh has {axis.degree}"
            what = f"mpu reports {size} {WORDS[axis.name]}, but {here}"
            raise ConfigError(
                what, where=WHERE, fix=f"set {key} to {size}" if key else "make the two degrees equal"
            )
        if rank is not None and rank != axis.rank:
            raise ConfigError(
                f"mpu numbers this rank {rank} among the {WORDS[axis.name]}, but the mesh numbers it "
                f"{axis.rank}",
                where=WHERE,
                fix="order the ranks of mpu with tensor parallelism innermost (adjacent ranks) and "
                "data-parallel ranks ascending",
            )
    split = [name for name, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)]
    if split and mesh.axes["tp"].degree > 1:
        raise ConfigError(
            f"layers are already split ({split[0]}), and tensor_parallel.autotp_size would split them again",
            where=WHERE,
            fix="build the model with unsplit layers",
        )


def _asked(mpu: Any, names: tuple[str, ...], what: str) -> int | None:
    """Return the value of the first getter that the mpu has, or None if it has none of them."""
    getters = (getattr(mpu, name.format(what), None) for name in names)
    getter = next((getter for getter in getters if callable(getter)), None)
    return None if getter is None else int(getter())
