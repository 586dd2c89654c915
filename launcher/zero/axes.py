"""Along which axis each kind of state is sharded: all of dp, or groups of neighbours inside it.

Along such groups shards are cut (MiCS), or kept a second time (hpZ).
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
        dp: all ranks that train the same parameters: dp, and with it cp, whose ranks share sequences.
        shard: along it parameters, gradients and optimizer state are sharded, where the stage says so. It is dp, or
            with MiCS a group of neighbours.
        replicate: the ranks with the same shard; gradients are summed along it, too. Degree 1, but for MiCS.
        secondary: along it gathered parameters are kept in a second shard, from the first gather after a step on
            (hpZ); later gathers stay on this axis. None: there is none.
        batches: how many ranks have batches of their own: gradients are divided by it. 0: those of dp.
    """

    dp: Axis
    shard: Axis
    replicate: Axis = field(default_factory=lambda: Axis("replicate"))
    secondary: Axis | None = None
    batches: int = 0

    @property
    def divisor(self) -> int:
        """Return what a sum of gradients over `dp` is divided by to be the mean over batches."""
        return self.batches or self.dp.degree

    def of_experts(self, edp: Axis) -> ShardAxes:
        """Return the axes of what the ranks of `edp` alone train: experts. The tokens of all batches reach them."""
        return ShardAxes(edp, edp, batches=self.divisor)


KEY = "zero_optimization"


def shard_axes(
    mesh: Mesh, *, mics_shard_size: int = -1, mics_hierarchical: bool = False, hpz_size: int = 1
) -> ShardAxes:
    """Return the axes that the JSON's sizes ask for. Every rank must call it.

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
            f"groups of {size} ranks do not divide the {degree} data-parallel ranks",
            where=where,
            fix=f"write one of {valid}",
        )


def _with_levels(mesh: Mesh, shard: Axis) -> Axis:
    """Gather in two hops, where the shard group spans several nodes; inside a node there is one hop."""
    inner = mesh.axes["tp"].degree
    node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size)) // inner)
    if shard.degree <= node:
        return shard
    if shard.degree % node:
        raise ConfigError(
            f"a shard group of {shard.degree} ranks is not made of whole nodes of {node}",
            where=f"{KEY}.mics_hierarchical_params_gather",
            fix=f"write false, or a mics_shard_size that is a multiple of {node}",
        )
    return mesh.with_levels(shard, node)
