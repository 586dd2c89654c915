"""Gathers of weights that the module casts to float8: they are cast before they are sent, so that half of the bytes
of bfloat16 are.

[Note: casting twice is casting once]

A float8 layer casts its weight with the scale 448 / (largest magnitude). Here each shard is cast with that same
scale, of the whole weight, and the gathered codes are divided by it, which gives values of the parameter's dtype. In
bfloat16 the largest of them is the original one, so the layer computes the same scale; each value times the scale is
a code again, up to an error of 2^-8 that rounding removes (codes have 3 bits after the leading one). The layer's
products are therefore bit for bit those of an exact gather. In float32 the scale may differ in its last bit.

[Note: when magnitudes are exchanged]

The largest magnitude of a weight is that of all its shards. They are exchanged by the first gather of every forward,
for all buffers at once: a collective for each buffer would wait behind the gathers of other units, and the
computation with it. Whether the values have changed since the last forward does not matter, because ranks may not
agree on that (`safe_set_local_fp32_param` changes one rank's shard), and the exchange is a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from launcher.comm import Pending, all_gather
from launcher.models.float8 import watch
from launcher.zero.flat import EXACT, FlatBuffer

FORWARD = "forward"
PIECE = 1 << 24  # elements that are converted at once, by way of fp32
SMALLEST = 1e-12  # of a largest magnitude: a weight of zeros has a scale, too


class Float8Gather:
    """Casts the shard to float8 for each gather, except for gathers that need exact values.

    Args:
        code: the float8 dtype of the layers' weights.

    Attributes:
        magnitudes: the largest magnitude of each weight [slots], fp32.
        is_new: no forward has used `magnitudes`.
        together: the gathers whose magnitudes are exchanged with those of this one.
    """

    held_bytes, rounds = 0, True

    def __init__(self, flat: FlatBuffer, code: torch.dtype) -> None:
        self.flat, self._code = flat, code
        for slot in flat.slots:
            for layer, _ in slot.owners:
                watch(layer, self._is_rounded)
        self.magnitudes: Tensor | None = None
        self.is_new = False
        self.together: Sequence[Float8Gather] = [self]

    def gather(self, buffer: Tensor, phase: str, tag: str) -> Pending | None:
        """Fill `buffer` from shards in float8."""
        if phase == EXACT:
            return None
        if self.magnitudes is None or (phase == FORWARD and not self.is_new):
            exchange(self.together)
        self.is_new = self.is_new and phase != FORWARD
        flat, scales = self.flat, self._scales()
        codes = torch.empty(flat.numel, dtype=torch.uint8, device=buffer.device)
        for index, at, values in _parts(flat):
            for part in _pieces(0, values.numel()):
                own = values[part].to(buffer.device)
                codes[at + part.start : at + part.stop] = _encoded(own, scales[index], self._code)
        flat.rest()
        pending = all_gather(codes, flat.axis, tag)

        def decode() -> None:
            for slot, scale in zip(flat.slots, scales, strict=True):
                for part in _pieces(slot.offset, slot.offset + slot.numel):
                    buffer[part] = codes[part].view(self._code).float().div_(scale)

        return Pending([pending], decode)

    def _is_rounded(self) -> bool:
        return self.flat.is_unsharded and not self.flat.is_exact

    def on_unsharded(self, full: Tensor) -> None: ...

    def on_change(self) -> None: ...

    def _scales(self) -> Tensor:
        """Return the scale of each weight [slots], fp32."""
        assert self.magnitudes is not None
        return (torch.finfo(self._code).max / self.magnitudes.double().clamp(min=SMALLEST)).float()


def exchange(gathers: Sequence[Float8Gather]) -> None:
    """Compute the largest magnitudes of the weights of all ranks. Collective."""
    axis, device = gathers[0].flat.axis, gathers[0].flat.pool.device
    own = torch.cat([_largest(one.flat).to(device) for one in gathers])
    every = own.new_zeros(axis.degree, own.numel())
    every[axis.rank] = own
    all_gather(every.view(-1), axis, f"{gathers[0].flat.name}/magnitudes").wait()
    for one, magnitudes in zip(
        gathers, every.amax(0).split([len(one.flat.slots) for one in gathers]), strict=True
    ):
        one.magnitudes, one.is_new = magnitudes, True


def exchange_together(flats: Iterable[FlatBuffer]) -> None:
    """Let the gathers of all buffers on an axis exchange their magnitudes at once, except for offloaded shards, of
    which few are in memory at a time."""
    groups: dict[int, list[Float8Gather]] = {}
    for flat in flats:
        for feature in flat.gather_features:
            if isinstance(feature, Float8Gather) and not flat.shard_is_offloaded:
                groups.setdefault(id(flat.axis), []).append(feature)
                feature.together = groups[id(flat.axis)]


def _largest(flat: FlatBuffer) -> Tensor:
    """Return the largest magnitude of each weight in this rank's shard [slots], fp32; 0 without a part in it."""
    largest = torch.zeros(len(flat.slots), device=flat.shard.device)
    parts = list(_parts(flat))
    if parts:  # not if the shard is padding
        norms = torch._foreach_norm([values for _, _, values in parts], float("inf"))
        first = parts[0][0]
        largest[first : first + len(parts)] = torch.stack(norms).float()
    return largest


def _parts(flat: FlatBuffer) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the weights in this rank's shard, in order: index, offset in the flat buffer, values."""
    first, shard = flat.shard_span.start, flat.shard
    for index, slot in enumerate(flat.slots):
        at, stop = max(slot.offset, first), min(slot.offset + slot.numel, flat.shard_span.stop)
        if at < stop:
            yield index, at, shard[at - first : stop - first]


def _pieces(start: int, stop: int) -> list[slice]:
    """Return slices of at most PIECE elements that cover a range."""
    return [slice(at, min(at + PIECE, stop)) for at in range(start, stop, PIECE)]


def _encoded(values: Tensor, scale: Tensor, code: torch.dtype) -> Tensor:
    most = torch.finfo(code).max
    scaled = values.float() * scale  # not in place: values of float32 are the shard itself
    return scaled.clamp_(-most, most).to(code).view(torch.uint8)
