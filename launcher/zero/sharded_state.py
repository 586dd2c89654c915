"""The sharding state of a flat buffer's parameters, and the protocols of features that extend it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from launcher.comm import Pending
from launcher.offload.offloaded import OffloadedTensor


class ShardedState(Enum):
    """The state of a flat buffer's parameters, by what is in this rank's memory.

    REPLICATED: all parameters, permanently; they are not sharded.
    SHARDED: only the shard; modules hold handles.
    UNSHARDING: the shard, and a pool buffer that an all-gather is filling and that must not be read yet.
    UNSHARDED: the shard, and all parameters in that buffer; modules hold leaves.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


class UnshardInFlight(NamedTuple):
    """An all-gather in flight. Dropping it before the wait would free memory that is still written to."""

    buffer: Tensor
    pending: Pending


class GatherFeature(Protocol):
    """A feature that may unshard a flat buffer in its own way (`zero/features/`). A plain run has none.

    Attributes:
        rounds: what it gathers may differ from the shards.
    """

    rounds: bool

    def gather(self, buffer: Tensor, phase: str, tag: str) -> Pending | None:
        """Start to fill `buffer`, or return None to leave it to the next feature or the plain all-gather."""

    def on_unsharded(self, full: Tensor) -> None:
        """Called when all parameters are gathered."""

    def on_change(self) -> None:
        """Called when the values of the shards have changed."""

    @property
    def held_bytes(self) -> int:
        """Return the bytes of parameters that the feature keeps between steps."""


class PackedShard(Protocol):
    """A shard that is stored in fewer bits than the compute dtype."""

    def pack(self) -> None:
        """Pack the values of the buffer's master weights or shard, and release these."""

    def unpack(self) -> OffloadedTensor:
        """Return the unpacked values, valid until `pack`."""
