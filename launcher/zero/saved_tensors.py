"""Packing of tensors that autograd saves: a position in a flat buffer instead of a reference to its memory.

[Note: saved tensors must not keep buffers alive]

Autograd saves weights for the backward. They are views of an unsharded buffer and would keep it alive from
forward to backward, so resharding would free nothing. While the model runs, a saved tensor whose storage
belongs to a buffer in `BufferPool.occupants` is therefore packed as (flat buffer, size, stride, offset). In
the backward it is unpacked from the buffer that holds the parameters then. Unpacking also signals that the
backward of a unit begins (`Hooks.enter_backward`).
A view that is saved without packing costs memory but never correctness: `BufferCache.take` does not hand out
a buffer whose storage is still referenced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from launcher.zero.flat import FlatBuffer

PackedTensor = tuple[FlatBuffer, torch.Size, tuple[int, ...], int | torch.SymInt]


class TensorPacking:
    """Packs tensors that autograd saves from flat buffers, between `start` and `stop`.

    Args:
        occupants: flat buffers by the address of the storage that holds their parameters.
        before_unpack: called in a backward with the flat buffer of the tensor; it must be unsharded when this
            returns.

    Attributes:
        enabled: whether there is anything to pack.
        plain_types: tensor types to inspect; other subclasses wrap plain tensors, which are packed instead.
    """

    def __init__(
        self, occupants: dict[int, FlatBuffer], before_unpack: Callable[[FlatBuffer], None], *, enabled: bool
    ) -> None:
        self.enabled = enabled
        self.plain_types: set[type] = {Tensor, nn.Parameter}
        self._occupants, self._before_unpack = occupants, before_unpack
        self._active: list[saved_tensors_hooks] = []

    @property
    def is_active(self) -> bool:
        return bool(self._active)

    def start(self) -> bool:
        """Start packing; return whether this call has started it. Does nothing if other saved-tensor hooks
        are active: torch.utils.checkpoint, for example, must see the tensors unchanged."""
        taken = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        starts = torch.is_grad_enabled() and self.enabled and not taken
        if starts:
            packing = saved_tensors_hooks(self._pack, self._unpack)
            packing.__enter__()
            self._active.append(packing)
        return starts

    def stop(self) -> None:
        """Undo the last `start`."""
        self._active.pop().__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> Tensor | PackedTensor:
        if type(tensor) not in self.plain_types or tensor.layout is not torch.strided:
            return tensor
        flat = self._occupants.get(tensor.untyped_storage()._cdata)
        return tensor if flat is None else (flat, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: Tensor | PackedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        flat, size, stride, offset = packed
        self._before_unpack(flat)
        assert flat.full is not None
        return flat.full.as_strided(size, stride, offset)
