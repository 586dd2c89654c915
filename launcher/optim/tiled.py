"""The step of a flat buffer by torch's own optimizer, in tiles, wherever `one_pass.py` does not apply: on GPUs,
and for optimizers without a fused rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from launcher.optim.whole import WholeOptimizer
from launcher.zero.flat import tiles
from launcher.zero.gradients import FlatGradient

if TYPE_CHECKING:
    from launcher.optim.sharded import ShardedOptimizer


def step(optimizer: ShardedOptimizer, gradient: FlatGradient, *, scale: float, dtype: torch.dtype) -> None:
    """Step the owned range of a buffer, slices of about `sub_group_size` elements together.

    Args:
        scale: factor on the gradient.
        dtype: of the arithmetic; weights and gradients are widened to it for their tile.
    """
    with _scaling_inside(optimizer.inner, scale, gradient.flat.master.device) as remaining:
        _step_tiles(optimizer, gradient, remaining, dtype)


@contextmanager
def _scaling_inside(inner: Any, scale: float, device: torch.device) -> Iterator[float]:
    """Let torch's fused kernels divide the gradients themselves, if possible; yield the factor left to apply."""
    takes_scale = getattr(inner, "_step_supports_amp_scaling", False)  # torch's protocol, also of GradScaler
    fused = takes_scale and all(group.get("fused") for group in inner.param_groups)
    if scale in (0.0, 1.0) or not fused or isinstance(inner, WholeOptimizer):
        yield scale
        return
    inner.grad_scale = torch.full((), 1 / scale, device=device)
    try:
        yield 1.0
    finally:
        del inner.grad_scale


def _step_tiles(
    optimizer: ShardedOptimizer, gradient: FlatGradient, scale: float, dtype: torch.dtype
) -> None:
    flat, owned, master = gradient.flat, gradient.owned, gradient.flat.master
    owned = _in_dtype(owned.to(master.device), torch.promote_types(owned.dtype, dtype))
    if scale != 1.0:
        owned.mul_(scale)
    owned = owned.to(dtype)
    masters = dict(flat.owned_views(master))
    used = [(slot, part) for slot, part in flat.owned_views(owned) if slot.used]
    for tile in tiles(used, optimizer.sub_group_size):
        for slot, part in tile:
            _load(optimizer.tensors[slot.name], part, masters[slot])
        optimizer.inner_step()
        for slot, _ in tile:
            _store(optimizer.tensors[slot.name], masters[slot])


def _load(tensor: nn.Parameter, gradient: Tensor, master: Tensor) -> None:
    """Pass a gradient to the inner optimizer, with the weights in the dtype of their step."""
    if master.dtype != gradient.dtype:
        tensor.data = master.to(gradient.dtype)
    tensor.grad = gradient


def _store(tensor: nn.Parameter, master: Tensor) -> None:
    tensor.grad = None
    if master.dtype != tensor.dtype:
        master.copy_(tensor.data)
        tensor.data = master


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype. On a GPU torch's foreach copy has twice the bandwidth of a plain copy."""
    if tensor.dtype == dtype or not tensor.is_cuda:
        return tensor.to(dtype)
    wide = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_([wide], [tensor])
    return wide
