"""The tensors that autograd saves of unsharded parameters: a place in a flat buffer, not the memory of that moment.

[Note: saved tensors must not keep buffers alive]

Autograd saves weights for the backward. They are views of an unsharded buffer, and would keep it alive from forward to
backward: then resharding would free nothing. So while the model runs, a saved tensor whose storage is a buffer that
`BufferPool.occupants` knows is packed as (flat buffer, size, stride, offset), and unpacked in the backward from the
buffer that is there then. Unpacking is also a sign that a unit's backward begins (`Hooks.enter_backward`).
A view that was saved elsewhere all the same costs memory, never correctness: `BufferCache.take` does not hand out a
buffer whose storage somebody still refers to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from launcher.zero.flat import FlatBuffer

PackedTensor = tuple[FlatBuffer, torch.Size, tuple[int, ...], int | torch.SymInt]


class TensorPacking:
    """Packs what autograd saves of flat buffers, between `start` and `stop`.

    Args:
        occupants: flat buffers by the address of the storage that their parameters are in.
        before_unpack: called in a backward with the buffer that is needed; parameters are there when it returns.

    Attributes:
        enabled: there may be something to pack.
        plain_types: tensors of these are looked at; others wrap what they are made of.
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
        """Pack what is saved for backward, from now on; return whether that is new. Who else takes what is saved, as
        torch.utils.checkpoint does to compute it again, must find it as it is."""
        taken = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        starts = torch.is_grad_enabled() and self.enabled and not taken
        if starts:
            packing = saved_tensors_hooks(self._pack, self._unpack)
            packing.__enter__()
            self._active.append(packing)
        return starts

    def stop(self) -> None:
        """End what the last `start` has begun."""
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
