"""`deepspeed.elasticity`: the batch size from the `elasticity` section. DeepSpeed had it until 0.19.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.config import load
from launcher.config.elasticity import micro_batch, refusal
from launcher.errors import ConfigError
from launcher.integrations.enumerations import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)

__all__ = ["ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the `elasticity` section is enabled."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> Any:
    """Return the batch size, and the world sizes that support it.

    Args:
        world_size: must be one of the supported world sizes; 0: not checked.
        return_microbatch: also return the microbatch size; always done if `world_size` is given.

    Returns:
        (sequences per step, supported world sizes[, microbatch size])

    Raises:
        ConfigError: the section is missing, disabled or invalid, or `world_size` is not supported.
    """
    if not elasticity_enabled(ds_config):
        raise ConfigError(
            "the section elasticity is missing or disabled",
            where="elasticity",
            fix='set "enabled": true in it',
        )
    section = load({"elasticity": dict(ds_config["elasticity"])}, where="compute_elastic_config()").elasticity
    batch, sizes = section.batch, section.world_sizes
    assert batch is not None and sizes is not None  # guaranteed by load()
    if world_size and world_size not in sizes:
        problem = refusal(section, world_size)
        raise ConfigError(problem.what, where="elasticity", fix=problem.fix)
    if not (world_size or return_microbatch):
        return batch.train, list(sizes)
    ranks = world_size or max(sizes)
    assert section.micro_batch_sizes is not None
    micro = micro_batch(batch.train, section.micro_batch_sizes, ranks // int(section.model_parallel_size))
    return batch.train, list(sizes), micro
