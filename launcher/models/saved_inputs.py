"""How the inputs of checkpointed blocks wait for the backward: split over an axis, in one buffer, on the host."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from launcher.comm import Axis, all_gather


@dataclass(frozen=True)
class Keeping:
    """What is done to a saved input; the answers of the JSON's `activation_checkpointing`.

    Attributes:
        axis: its ranks have the same inputs: each keeps 1/N (N: the degree). Degree 1 keeps all.
        on_host: inputs wait in host memory.
        places: one buffer has room for so many inputs; 0: each has memory of its own.
    """

    axis: Axis = field(default_factory=lambda: Axis("tp"))
    on_host: bool = False
    places: int = 0

    @property
    def changes_nothing(self) -> bool:
        """Inputs are kept as they are."""
        return self.axis.degree == 1 and not self.on_host and not self.places


class Kept:
    """One saved input while it waits. `piece` [s]: its elements, or this rank's 1/N of them, padded to N * s."""

    def __init__(self, piece: Tensor, like: Tensor, *, split: bool) -> None:
        self.piece, self.split = piece, split
        self.shape, self.numel, self.device = like.shape, like.numel(), like.device


class SavedInputs:
    """Packs what a checkpoint saves of its inputs, and gives it back before the recomputation.

    With tensor parallelism the input of a block is the same on all ranks of the axis, so splitting it loses
    nothing (Korthikanti et al. 2022, arXiv:2205.05198, section 5).

    Attributes:
        kept_bytes: bytes that wait now.
        host_bytes: bytes that were copied to the host since the start.
    """

    def __init__(self, keeping: Keeping) -> None:
        self.keeping = keeping
        self.kept_bytes = self.host_bytes = 0
        self._places = _Places(keeping.places)

    def hooks(self) -> saved_tensors_hooks:
        """The context around a checkpoint: what it saves inside is kept as `keeping` says."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Kept:
        """Take the elements that this rank keeps out of `tensor`."""
        axis = self.keeping.axis
        split = axis.degree > 1 and tensor.is_floating_point() and tensor.numel() >= axis.degree
        piece = tensor.detach().reshape(-1)  # [numel]
        if split:
            size = -(-piece.numel() // axis.degree)
            mine = piece[axis.rank * size : (axis.rank + 1) * size]
            piece = torch.nn.functional.pad(mine, (0, size - mine.numel())).clone()  # [size]
        kept = Kept(piece, tensor, split=split)
        if self.keeping.places:
            kept.piece = self._places.put(kept, host=self.keeping.on_host)
        elif self.keeping.on_host:
            kept.piece = _empty_like(piece, host=True).copy_(piece, non_blocking=True)
        size_in_bytes = kept.piece.numel() * kept.piece.element_size()
        self.kept_bytes += size_in_bytes
        self.host_bytes += size_in_bytes if self.keeping.on_host else 0
        weakref.finalize(kept, self._let_go, size_in_bytes).atexit = False
        return kept

    def unpack(self, kept: Kept) -> Tensor:
        """The whole input again, on its device. Where it was split: a collective of the axis."""
        axis, piece = self.keeping.axis, kept.piece
        if kept.split:
            full = torch.empty(piece.numel() * axis.degree, dtype=piece.dtype, device=kept.device)
            full[axis.span(full.numel())].copy_(piece, non_blocking=True)
            all_gather(full, axis, "checkpoint/unsplit").wait()
            return full[: kept.numel].view(kept.shape)
        if self.keeping.places and piece.device == kept.device:
            # its place may be given to the next input while somebody still has this one
            return piece.clone().view(kept.shape)
        return piece.to(kept.device, non_blocking=True).view(kept.shape)

    def reset(self) -> None:
        """Make a new buffer at the next input, for example when their size has changed."""
        self._places = _Places(self.keeping.places)

    def _let_go(self, size_in_bytes: int) -> None:
        self.kept_bytes -= size_in_bytes


class _Places:
    """One buffer of equal places. The first input decides their size."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free: list[Tensor] | None = None  # each [s]
        self._like = (0, torch.float32, torch.device("cpu"))

    def put(self, kept: Kept, *, host: bool) -> Tensor:
        """A copy of the piece in a free place, or in memory of its own where none fits."""
        piece = kept.piece
        like = (piece.numel(), piece.dtype, piece.device)
        if self._free is None:
            self._like = like
            buffer = _empty_like(piece, host=host, numel=self._number * piece.numel())
            self._free = list(buffer.view(self._number, -1))
        if like != self._like or not self._free:
            return _empty_like(piece, host=host).copy_(piece, non_blocking=True)
        place = self._free.pop()
        weakref.finalize(kept, self._free.append, place).atexit = False
        return place.copy_(piece, non_blocking=True)


def _empty_like(piece: Tensor, *, host: bool, numel: int | None = None) -> Tensor:
    """Memory for `numel` (default: as many) elements of the piece's dtype, on its device or the host."""
    size = piece.numel() if numel is None else numel
    if not host:
        return torch.empty(size, dtype=piece.dtype, device=piece.device)
    # Page-locked: the copy is queued on the device's stream, as is the copy back, which keeps the two in order.
    return torch.empty(size, dtype=piece.dtype, pin_memory=piece.is_cuda)
