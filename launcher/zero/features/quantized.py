"""8-bit block quantisation of gathered parameters and of frozen shards.

Gathers use it with `zero_quantized_weights`, the shards of frozen parameters with
`zero_quantized_nontrainable_weights`.
"""

from __future__ import annotations

from torch import Tensor

from launcher.comm import Pending
from launcher.comm.quantized import dequantize, quantize, quantized_all_gather
from launcher.offload.offloaded import OffloadedTensor
from launcher.zero.flat import EXACT, FlatBuffer

BITS = 8


class QuantizedGather:
    """Quantises the shard for each gather, except for gathers that need exact values."""

    held_bytes, rounds = 0, True

    def __init__(self, flat: FlatBuffer) -> None:
        self._flat = flat

    def gather(self, buffer: Tensor, phase: str, tag: str) -> Pending | None:
        """Fill `buffer` from quantised shards."""
        if phase == EXACT:
            return None
        return quantized_all_gather(buffer, quantize(self._flat.shard, BITS), self._flat.axis, tag, bits=BITS)

    def on_unsharded(self, full: Tensor) -> None: ...

    def on_change(self) -> None: ...


class QuantizedShard:
    """The shard of frozen parameters, quantised once; replaces `shard` and `master`."""

    rounds = False

    def __init__(self, flat: FlatBuffer) -> None:
        self._flat = flat
        self._packed: Tensor | None = None
        self._unpacked: OffloadedTensor | None = None

    # ---- as a GatherFeature -----------------------------------------------------------------

    def gather(self, buffer: Tensor, phase: str, tag: str) -> Pending | None:
        """Fill `buffer` from quantised shards."""
        assert self._packed is not None
        return quantized_all_gather(buffer, self._packed, self._flat.axis, tag, bits=BITS)

    def on_unsharded(self, full: Tensor) -> None: ...

    def on_change(self) -> None: ...

    @property
    def held_bytes(self) -> int:
        return 0 if self._packed is None else self._packed.nbytes

    # ---- as a PackedShard -------------------------------------------------------------------

    def pack(self) -> None:
        """Quantise the values of the buffer and free the originals."""
        flat = self._flat
        values = flat.shard if self._packed is None else self.unpack().load()
        self._packed = quantize(values, BITS)
        nothing = flat.placements.staying(flat.empty)
        self._unpacked = None
        flat.keep(nothing, nothing)

    def unpack(self) -> OffloadedTensor:
        """Return the dequantised values, valid until `pack`."""
        flat = self._flat
        if self._unpacked is None:
            assert self._packed is not None
            whole = flat.empty.new_empty(flat.numel // flat.axis.degree)
            self._unpacked = flat.placements.staying(dequantize(self._packed, whole, BITS))
            flat.keep(flat.placements.staying(flat.empty), self._unpacked)
        return self._unpacked
