"""Along which axis each kind of state is sharded: all of dp, or groups inside it (MiCS, hpZ)."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.comm import Axis


@dataclass(frozen=True)
class ShardAxes:
    """The axes of ZeRO inside data parallelism.

    Args:
        dp: all ranks that train the same parameters.
        shard: along it parameters, gradients and optimizer state are sharded, where the stage says so. It is dp, or
            with MiCS a group of neighbours.
        replicate: the ranks with the same shard; gradients are summed along it, too. Degree 1, but for MiCS.
        secondary: along it gathered parameters are kept in a second shard, from the first gather after a step on
            (hpZ); later gathers stay on this axis. None: there is none.
    """

    dp: Axis
    shard: Axis
    replicate: Axis = field(default_factory=lambda: Axis("replicate"))
    secondary: Axis | None = None
