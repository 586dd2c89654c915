"""Stores saved inputs of checkpointed blocks until backward: split over an axis, in one buffer, on the host.

On the host: while a block runs, its inputs are copied to the host, and after it has run, they are freed on
the device. When the backward reaches a block, the inputs of the previous block are prefetched, overlapping
with the recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from launcher.comm import Axis, all_gather
from launcher.models import host_copies
from launcher.models.host_copies import CopyLane, host_memory


@dataclass(frozen=True)
class SavedInputPolicy:
    """How saved inputs are stored, from the JSON's `activation_checkpointing`.

    Attributes:
        axis: its ranks have the same inputs, so each keeps 1/N (N: the degree).
        on_host: keep inputs in host memory.
        places: capacity of the contiguous buffer, in inputs; 0: every input is allocated separately.
    """

    axis: Axis = field(default_factory=lambda: Axis("tp"))
    on_host: bool = False
    places: int = 0

    @property
    def changes_nothing(self) -> bool:
        """Return whether inputs are kept unchanged."""
        return self.axis.degree == 1 and not self.on_host and not self.places


class SavedInput:
    """One saved input. `piece` [s]: its elements, or this rank's 1/N of them, the total padded to N * s."""

    def __init__(self, piece: Tensor, like: Tensor, *, split: bool) -> None:
        self.piece, self.split = piece, split
        self.shape, self.numel, self.device = like.shape, like.numel(), like.device


class BlockInputs:
    """The inputs that one run of a block saved.

    Attributes:
        before: returns the previous run's inputs, if still saved: a backward needs them next.
        inputs: the saved inputs; several blocks may have saved the same one, for example a mask.
        arrived: pieces that are back on the device and not yet unpacked.
    """

    def __init__(self, before: Callable[[], BlockInputs | None]) -> None:
        self.before = before
        self.inputs: list[SavedInput] = []
        self.arrived: dict[SavedInput, Tensor] = {}


Coming = dict[SavedInput, tuple[Tensor, Any]]  # pieces on the device [s], and the tickets of their copies


class SavedInputs:
    """Packs the inputs that a checkpoint saves, and unpacks them before the recomputation.

    With tensor parallelism the input of a block is the same on all ranks of the axis, so splitting it loses
    nothing (Korthikanti et al. 2022, arXiv:2205.05198, section 5).

    Attributes:
        kept_bytes: bytes of the inputs that are currently saved.
        host_bytes: bytes copied to the host since the start.
    """

    def __init__(self, keeping: SavedInputPolicy) -> None:
        self.keeping = keeping
        self.kept_bytes = self.host_bytes = 0
        self._places = _Places(keeping.places)
        self._same: dict[tuple[Any, ...], tuple[weakref.ref[SavedInput], StorageWeakRef]] = {}
        self._lanes: dict[torch.device, tuple[CopyLane, CopyLane]] = {}
        # inputs of the running block, held until they are copied
        self._leaving: list[tuple[CopyLane, Any, Tensor]] = []
        self._newest: Callable[[], BlockInputs | None] = _nothing
        self._at: Callable[[], BlockInputs | None] = _nothing  # the block that the backward has reached
        self._ahead: tuple[BlockInputs, Coming] | None = None  # the prefetched block, at most one

    @contextmanager
    def block(self) -> Iterator[None]:
        """Wrap a checkpoint, whose saved inputs are then kept according to `keeping`."""
        block = BlockInputs(self._newest)
        self._newest = weakref.ref(block)
        try:
            with saved_tensors_hooks(
                lambda tensor: self._pack_of_block(tensor, block), self._unpack_of_block
            ):
                yield
        finally:
            self._let_leave()

    def _pack_of_block(self, tensor: Tensor, block: BlockInputs) -> tuple[BlockInputs, SavedInput] | Tensor:
        if tensor.numel() == 0:  # torch 2.11 saves an empty tensor, too
            return tensor
        return block, self.pack(tensor, block)

    def pack(self, tensor: Tensor, block: BlockInputs) -> SavedInput:
        """Save the elements of `tensor` that this rank keeps, once for all blocks that save it."""
        storage = tensor.untyped_storage()
        where = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
        key = (*where, tensor.dtype, tensor._version)
        known, alive = self._same.get(key, (_nothing, None))
        kept = None if alive is None or alive.expired() else known()
        if kept is None:
            kept = self._keep(tensor)
            self._same[key] = weakref.ref(kept), StorageWeakRef(storage)
            weakref.finalize(kept, self._same.pop, key, None).atexit = False
        block.inputs.append(kept)
        return kept

    def _keep(self, tensor: Tensor) -> SavedInput:
        axis, on_host = self.keeping.axis, self.keeping.on_host
        split = axis.degree > 1 and tensor.is_floating_point() and tensor.numel() >= axis.degree
        piece = tensor.detach().reshape(-1)  # [numel]
        if split:
            size = -(-piece.numel() // axis.degree)
            mine = piece[axis.rank * size : (axis.rank + 1) * size]
            piece = torch.nn.functional.pad(mine, (0, size - mine.numel())).clone()  # [size]
        kept = SavedInput(piece, tensor, split=split)
        if self.keeping.places or on_host:
            kept.piece = self._places.take(kept, host=on_host)
            if on_host:
                out, _ = self._lanes_of(tensor.device)
                self._leaving.append((out, out.copy(kept.piece, piece), piece))
            else:
                kept.piece.copy_(piece)
        size_in_bytes = kept.piece.numel() * kept.piece.element_size()
        self.kept_bytes += size_in_bytes
        self.host_bytes += size_in_bytes if on_host else 0
        weakref.finalize(kept, self._let_go, size_in_bytes).atexit = False
        return kept

    def _let_leave(self) -> None:
        """Release the copied inputs: later work waits for the copies before it reuses their memory."""
        for lane, ticket, _ in self._leaving:
            lane.wait(ticket)
        self._leaving.clear()

    def _unpack_of_block(self, packed: tuple[BlockInputs, SavedInput] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        block, kept = packed
        return self.unpack(kept, block)

    def unpack(self, kept: SavedInput, block: BlockInputs) -> Tensor:
        """Return the full input on its device. If it was split, this is a collective over the axis."""
        if self.keeping.on_host:
            self._arrive_at(block)
            piece = block.arrived.pop(kept, None)
            if piece is None:  # unpacked a second time
                piece = self._settle(self._start([kept]))[kept]
        else:
            piece = kept.piece
        if kept.split:
            axis = self.keeping.axis
            full = torch.empty(piece.numel() * axis.degree, dtype=piece.dtype, device=kept.device)
            full[axis.span(full.numel())].copy_(piece)
            all_gather(full, axis, "checkpoint/unsplit").wait()
            return full[: kept.numel].view(kept.shape)
        # the place may be reused for another input while this one is still in use
        return (piece.clone() if piece is kept.piece and self.keeping.places else piece).view(kept.shape)

    def _arrive_at(self, block: BlockInputs) -> None:
        """Wait until the block's inputs are on the device, and prefetch those of the previous block."""
        if self._at() is block:
            return
        self._at = weakref.ref(block)
        foreseen, coming = self._ahead or (None, {})
        self._ahead = None
        # even if the backward went to another block: their memory can be freed from here on
        pieces = self._settle(coming)
        block.arrived = pieces if foreseen is block else self._settle(self._start(block.inputs))
        before = block.before()
        if before is not None:
            self._ahead = before, self._start(before.inputs)

    def _start(self, inputs: list[SavedInput]) -> Coming:
        coming: Coming = {}
        for kept in dict.fromkeys(inputs):
            piece = torch.empty(kept.piece.numel(), dtype=kept.piece.dtype, device=kept.device)
            coming[kept] = piece, self._lanes_of(kept.device)[1].copy(piece, kept.piece)
        return coming

    def _settle(self, coming: Coming) -> dict[SavedInput, Tensor]:
        for kept, (_, ticket) in coming.items():
            self._lanes_of(kept.device)[1].wait(ticket)
        return {kept: piece for kept, (piece, _) in coming.items()}

    def _lanes_of(self, device: torch.device) -> tuple[CopyLane, CopyLane]:
        if device not in self._lanes:
            self._lanes[device] = host_copies.lanes(device)
        return self._lanes[device]

    def reset(self) -> None:
        """Allocate a new buffer at the next input, for example because the size of inputs has changed."""
        self._places = _Places(self.keeping.places)

    def _let_go(self, size_in_bytes: int) -> None:
        self.kept_bytes -= size_in_bytes


class _Places:
    """Memory for inputs: one buffer of equally sized places. The first input determines their size."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free: list[Tensor] | None = None  # each [s]
        self._like = (0, torch.float32, torch.device("cpu"))

    def take(self, kept: SavedInput, *, host: bool) -> Tensor:
        """Return memory [s] for the piece: a free place, or a separate allocation if none fits."""
        piece = kept.piece
        like = (piece.numel(), piece.dtype, piece.device)
        if self._free is None:
            self._like = like
            self._free = list(
                _memory(self._number * piece.numel(), piece, host=host).view(self._number, piece.numel())
            )
        if like != self._like or not self._free:
            return _memory(piece.numel(), piece, host=host)
        place = self._free.pop()
        weakref.finalize(kept, self._free.append, place).atexit = False
        return place


def _memory(numel: int, like: Tensor, *, host: bool) -> Tensor:
    return host_memory(numel, like) if host else torch.empty(numel, dtype=like.dtype, device=like.device)


def _nothing() -> None:
    """Return None, as a dead weak reference does."""
