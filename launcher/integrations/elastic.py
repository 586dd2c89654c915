"""`deepspeed.elasticity`: the batch size of the section `elasticity`. DeepSpeed had it until 0.19.6."""

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
    """Return whether the JSON's section is on."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> Any:
    """Return the batch size, and the numbers of ranks on which it works.

    Args:
        world_size: must be one of them; 0: not asked.
        return_microbatch: give the micro batch of that many ranks, too.

    Returns:
        (sequences per step, numbers of ranks[, micro batch])

    Raises:
        ConfigError: the section is missing, off or wrong, or `world_size` is not allowed.
    """
    if not elasticity_enabled(ds_config):
        raise ConfigError(
            "the section elasticity is missing or off", where="elasticity", fix='write "enabled": true in it'
        )
    section = load({"elasticity": dict(ds_config["elasticity"])}, where="compute_elastic_config()").elasticity
    batch, sizes = section.batch, section.world_sizes
    assert batch is not None and sizes is not None  # load() has seen to it
    if world_size and world_size not in sizes:
        problem = refusal(section, world_size)
        raise ConfigError(problem.what, where="elasticity", fix=problem.fix)
    if not (world_size or return_microbatch):
        return batch.train, list(sizes)
    ranks = world_size or max(sizes)
    assert section.micro_batch_sizes is not None
    micro = micro_batch(batch.train, section.micro_batch_sizes, ranks // int(section.model_parallel_size))
    return batch.train, list(sizes), micro
