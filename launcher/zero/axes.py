"""The axes along which each kind of state is sharded: all of dp, or groups of neighbouring ranks inside it.

Shards are partitioned within such a group (MiCS), or kept a second time within it (hpZ).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from launcher.comm import Axis, Mesh
from launcher.errors import ConfigError


@dataclass(frozen=True)
class ShardAxes:
    """The axes of ZeRO inside data parallelism.

    Args:
        dp: all ranks that train the same parameters: dp combined with cp, whose ranks share sequences.
        shard: the axis along which parameters, gradients and optimizer state are sharded, depending on the
            stage. It is dp or, with MiCS, a group of neighbouring ranks.
        replicate: the ranks that hold the same shard; gradients are also summed along it. Its degree is 1
            without MiCS.
        secondary: the axis of the second shard of gathered parameters (hpZ), which is kept from the first
            gather after a step on and serves the later gathers. None: no second shard.
        batches: the number of ranks with their own batches, by which gradients are divided. 0: all ranks of
            dp.
    """

    dp: Axis
    shard: Axis
    replicate: Axis = field(default_factory=lambda: Axis("replicate"))
    secondary: Axis | None = None
    batches: int = 0

    @property
    def divisor(self) -> int:
        """Return the divisor that turns a sum of gradients over `dp` into the mean over batches."""
        return self.batches or self.dp.degree

    def of_experts(self, edp: Axis) -> ShardAxes:
        """Return the axes of experts, which only the ranks of `edp` train, on tokens from all batches."""
        return ShardAxes(edp, edp, batches=self.divisor)


KEY = "zero_optimization"


def shard_axes(
    mesh: Mesh, *, mics_shard_size: int = -1, mics_hierarchical: bool = False, hpz_size: int = 1
) -> ShardAxes:
    """Return the axes for the configured sizes. Every rank must call it.

    Args:
        mics_shard_size: `mics_shard_size`; -1: shards over all of dp.
        mics_hierarchical: `mics_hierarchical_params_gather`.
        hpz_size: `zero_hpz_partition_size`; 1: no second shard.

    Raises:
        ConfigError: a size does not divide the degree of dp.
    """
    dp = mesh.dp_cp
    if mics_shard_size > 0:
        _check(mics_shard_size, dp.degree, f"{KEY}.mics_shard_size")
        shard, replicate = mesh.split_dp(mics_shard_size)
        return ShardAxes(dp, _with_levels(mesh, shard) if mics_hierarchical else shard, replicate)
    _check(hpz_size, dp.degree, f"{KEY}.zero_hpz_partition_size")
    second = mesh.split_dp(hpz_size)[0] if 1 < hpz_size < dp.degree else None
    return ShardAxes(dp, dp, secondary=second)


def _check(size: int, degree: int, where: str) -> None:
    if degree % size:
        valid = ", ".join(str(n) for n in range(1, degree + 1) if degree % n == 0)
        raise ConfigError(
            f"the group size {size} does not divide the data-parallel degree {degree}",
            where=where,
            fix=f"use one of {valid}",
        )


def _with_levels(mesh: Mesh, shard: Axis) -> Axis:
    """Return the axis with two-hop gathers if the shard group spans several nodes, else unchanged."""
    inner = mesh.axes["tp"].degree
    node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size)) // inner)
    if shard.degree <= node:
        return shard
    if shard.degree % node:
        raise ConfigError(
            f"shard group size {shard.degree} is not a multiple of the {node} ranks per node",
            where=f"{KEY}.mics_hierarchical_params_gather",
            fix=f"set it to false, or use a mics_shard_size that is a multiple of {node}",
        )
    return mesh.with_levels(shard, node)
