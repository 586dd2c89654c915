"""Gathers of weights that the module casts to float8: they are cast before they are sent, so that half of the bytes
of bfloat16 are.

[Note: casting twice is casting once]

A float8 layer casts its weight with the scale 448 / (largest magnitude). Here each shard is cast with that same
scale, of the whole weight, and the gathered codes are divided by it, which gives values of the parameter's dtype. In
bfloat16 the largest of them is the original one, so the layer computes the same scale; each value times the scale is
a code again, up to an error of 2^-8 that rounding removes (codes have 3 bits after the leading one). The layer's
products are therefore bit for bit those of an exact gather. In float32 the scale may differ in its last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.comm import Pending, all_gather
from launcher.zero.flat import EXACT, FlatBuffer

PIECE = 1 << 24  # elements that are converted at once, by way of fp32
SMALLEST = 1e-12  # of a largest magnitude: a weight of zeros has a scale, too


class Float8Gather:
    """Casts the shard to float8 for each gather, except for gathers that need exact values.

    Args:
        code: the float8 dtype of the layers' weights.
    """

    held_bytes = 0

    def __init__(self, flat: FlatBuffer, code: torch.dtype) -> None:
        self._flat, self._code = flat, code
        self._magnitudes: Tensor | None = None  # [degree, slots]: the largest ones in each rank's shard
        self._pending: Pending | None = None

    def gather(self, buffer: Tensor, phase: str, tag: str) -> Pending | None:
        """Fill `buffer` from shards in float8."""
        if phase == EXACT:
            return None
        flat = self._flat
        if self._magnitudes is None:  # not yet changed by a step
            self.on_change()
        scales = self._scales()
        codes = torch.empty(flat.numel, dtype=torch.uint8, device=buffer.device)
        for index, slot in enumerate(flat.slots):
            for at in _pieces(slot.offset, slot.offset + slot.numel, flat.shard_span):
                own = flat.shard[at.start - flat.shard_span.start : at.stop - flat.shard_span.start]
                codes[at] = _encoded(own.to(buffer.device), scales[index], self._code)
        flat.rest()
        pending = all_gather(codes, flat.axis, tag)

        def decode() -> None:
            for index, slot in enumerate(flat.slots):
                for at in _pieces(slot.offset, slot.offset + slot.numel):
                    buffer[at] = codes[at].view(self._code).float().div_(scales[index])

        return Pending([pending], decode)

    def on_unsharded(self, full: Tensor) -> None: ...

    def on_change(self) -> None:
        """Start to exchange the largest magnitudes of the new values, long before the next gather waits for them."""
        flat = self._flat
        magnitudes = flat.empty.new_zeros(flat.axis.degree, len(flat.slots), dtype=torch.float32)
        found = {slot: (start, stop) for slot, start, stop in flat.overlaps(flat.shard_span)}
        first = flat.shard_span.start
        for index, slot in enumerate(flat.slots):
            if slot in found:
                start, stop = (slot.offset + at - first for at in found[slot])
                magnitudes[flat.axis.rank, index] = flat.shard[start:stop].abs().amax()
        self._magnitudes = magnitudes
        self._pending = all_gather(magnitudes.view(-1), flat.axis, f"{flat.name}/magnitudes")

    def _scales(self) -> Tensor:
        """Return the scale of each slot's weight [slots], fp32."""
        assert self._magnitudes is not None
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        largest = self._magnitudes.amax(0).double().clamp_(min=SMALLEST)
        return (torch.finfo(self._code).max / largest).float()


def _pieces(start: int, stop: int, within: slice | None = None) -> list[slice]:
    """Return slices of at most PIECE elements that cover a range, or its part in `within`."""
    if within is not None:
        start, stop = max(start, within.start), min(stop, within.stop)
    return [slice(at, min(at + PIECE, stop)) for at in range(start, stop, PIECE)]


def _encoded(values: Tensor, scale: Tensor, code: torch.dtype) -> Tensor:
    most = torch.finfo(code).max
    scaled = values.float() * scale  # not in place: values of float32 are the shard itself
    return scaled.clamp_(-most, most).to(code).view(torch.uint8)
