"""The state of a flat buffer's parameters on a rank, and what features may add to that."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from launcher.comm import Pending
from launcher.offload.offloaded import OffloadedTensor


class ShardedState(Enum):
    """The state of a flat buffer's parameters in this rank's memory.

    REPLICATED: all of them, for good: they are not sharded.
    SHARDED: the shard; modules show handles.
    UNSHARDING: the shard, and a buffer of the pool that an all-gather fills: nobody may read it yet.
    UNSHARDED: the shard, and all of them in that buffer; modules show leaves.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class UnshardInFlight(NamedTuple):
    """An all-gather under way. Whoever drops it before the wait gives memory away that peers still fill."""

    buffer: Tensor
    pending: Pending


class GatherFeature(Protocol):
    """A feature that may unshard a flat buffer in its own way (`zero/features/`); a plain run has none."""

    def gather(self, buffer: Tensor, phase: str, tag: str) -> Pending | None:
        """Start to fill `buffer`; None: another way has to be taken."""

    def on_unsharded(self, full: Tensor) -> None:
        """All parameters are there."""

    def on_change(self) -> None:
        """The shards have other values from now on."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of parameters that it keeps between steps."""


class PackedShard(Protocol):
    """A shard that is kept in fewer bits than it is computed with."""

    def pack(self) -> None:
        """Take the values of the buffer's master weights or shard, and let those go."""

    def unpack(self) -> OffloadedTensor:
        """Return the values, until `pack`."""
