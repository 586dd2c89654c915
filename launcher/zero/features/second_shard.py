"""hpZ: a second shard of the parameters on a smaller axis, which serves gathers until the next step."""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from launcher.comm import Axis, Pending, all_gather
from launcher.offload.tier import memory
from launcher.zero.flat import EXACT, FlatBuffer


class SecondState(Enum):
    """The state of the second shard.

    STALE: values from before the last step, or none.
    FILLING: still stale; the gather in flight brings the values of this step.
    FRESH: the parameters of this step as they were gathered, possibly quantised.
    """

    STALE = "stale"
    FILLING = "filling"
    FRESH = "fresh"


class SecondShard:
    """Slice r of the parameters gathered last, where r is the rank on the secondary axis.

    Args:
        flat: the flat buffer of the parameters.
        axis: `ShardAxes.secondary`.
    """

    def __init__(self, flat: FlatBuffer, axis: Axis) -> None:
        self._axis, self.rounds = axis, flat.policy.quantized_weights or flat.float8 is not None
        self._span, self._state = axis.span(flat.numel), SecondState.STALE
        self.tensor = memory(flat.numel // axis.degree, flat.dtype, flat.pool.device).zero_()

    def gather(self, buffer: Tensor, phase: str, tag: str) -> Pending | None:
        """Fill `buffer` along the secondary axis if the second shard has the requested values."""
        # the second shard may hold quantised values, which do not serve an exact gather
        good = phase != EXACT or not self.rounds
        if self._state is SecondState.FRESH and good:
            buffer[self._span].copy_(self.tensor)
            return all_gather(buffer, self._axis, tag)
        if self._state is SecondState.STALE and phase != EXACT:
            self._state = SecondState.FILLING
        return None

    def on_unsharded(self, full: Tensor) -> None:
        """Store this rank's slice of the gathered parameters."""
        if self._state is SecondState.FILLING:
            self.tensor.copy_(full[self._span])
            self._state = SecondState.FRESH

    def on_change(self) -> None:
        """Mark the second shard as stale."""
        if self._state is SecondState.FRESH:
            self._state = SecondState.STALE

    @property
    def held_bytes(self) -> int:
        return self.tensor.nbytes


def second_shards(flat: FlatBuffer) -> list[Tensor]:
    """Return the second shards of a buffer: one, or none."""
    return [feature.tensor for feature in flat.gather_features if isinstance(feature, SecondShard)]
