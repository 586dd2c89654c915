"""The section `fault_tolerance`: replicas that train together and can do without each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from launcher.config.section import Count, Section
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.root import Config


class FaultToleranceConfig(Section):
    """A recipe's ranks form replicas, which train together and can do without each other: when a rank dies, its replica
    is started again, and the others go on meanwhile (torchft; FT-HSDP, arXiv:2602.00277).

    ZeRO, tensor parallelism and pipeline stages lie inside a replica. Between replicas the mean of gradients is taken
    before each step, weighted by tokens. Where a replica is away, the mean is over those that are left. One that comes
    back copies the state of another. The batch keys count the ranks of all replicas."""

    differs: ClassVar[dict[str, str]] = {
        "replicas": "a key of this launcher",
        "timeout_s": "a key of this launcher",
    }

    replicas: Count = 1
    """Into how many the ranks are divided."""

    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that replicas wait for one that neither answers nor ends, before they go on without it."""


def of_replica(config: Config) -> Config:
    """Return what one of the replicas trains with: its part of the global batch.

    Raises:
        ConfigError: it cannot be divided.
    """
    replicas = config.fault_tolerance.replicas
    if replicas == 1:
        return config
    batch = config.train_batch_size
    if not isinstance(batch, int):
        return config
    if batch % replicas:
        raise ConfigError(
            f"train_batch_size {batch} is not a multiple of {replicas} replicas",
            where=config.where("train_batch_size"),
            fix=f"write {batch // replicas * replicas or replicas}, or leave it out",
        )
    return config.model_copy(update={"train_batch_size": batch // replicas})


def check_replicas_are_started(config: Config) -> None:
    """Raise `ConfigError` where this process is not a rank of one of them."""
    from launcher.replica import REPLICAS

    if REPLICAS not in os.environ:
        raise ConfigError(
            "replicas are started by `launch`, for its recipes: this process is none",
            where=config.where("fault_tolerance.replicas"),
            fix="launch --config DS.json pretrain ..., or leave fault_tolerance out",
        )
