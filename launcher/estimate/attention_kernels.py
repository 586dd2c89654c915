"""Kernels of scaled dot-product attention, and the memory that each saves from forward to backward.

    flash       output and logsumexp per row; backward sums the query gradient in fp32. fp16, bf16; no mask
    efficient   the same, also with masks and in fp32; backward sums in fp32 only for fp32 inputs
    math        the score matrices: torch's fallback where no other kernel is usable
    cpu         torch's CPU kernel on the machine that makes the estimate

torch selects the first kernel that supports the inputs (torch.backends.cuda, in its own order of preference).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CPU_KERNELS = ("cpu",)
GPU_KERNELS = ("flash", "efficient", "math")
WIDEST = 256
"""Largest head dimension that the flash kernel supports."""


def choose_kernel(
    available: Collection[str], query: Tensor, *, masked: bool = False, grouped: bool = False
) -> str:
    """Return the kernel that torch selects.

    Args:
        available: kernels of the device.
        query: [..., heads, tokens, head dimension].
        masked: whether there is a mask tensor.
        grouped: whether several query heads share a key head (GQA), without repeated keys.
    """
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if "flash" in available and narrow and not masked and query.shape[-1] <= WIDEST:
        return "flash"
    if "efficient" in available and not grouped and (narrow or query.dtype is torch.float32):
        return "efficient"
    return "cpu" if "cpu" in available else "math"


@contextmanager
def attention_of(available: Collection[str], used: set[str]) -> Iterator[None]:
    """Make attention inside the context allocate the memory that it needs on a device.

    This patches the function, because a torch function mode is disabled in backward, where blocks are
    recomputed.

    Args:
        available: kernels of the device.
        used: the names of the kernels used are added to this set.
    """
    plain = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        kernel = choose_kernel(available, query, masked=attn_mask is not None, grouped=grouped)
        used.add(kernel)
        if kernel == "cpu":
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if kernel == "math":
            made: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
            return made
        fused: Tensor = _Fused.apply(query, key, value, attn_mask, kernel == "flash")  # type: ignore[no-untyped-call]
        return fused

    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


class _Fused(torch.autograd.Function):
    """Allocates the tensors of a fused kernel, which does not store the scores, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, flash: bool
    ) -> Tensor:
        *batch, heads, tokens, _ = query.shape
        laid_out = (*batch, tokens, heads, value.shape[-1])  # the kernels' layout: no copy follows
        out = query.new_empty(laid_out).transpose(-3, -2)
        logs = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logs, *(() if mask is None else (mask,)))
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, _, logs, *_ = ctx.saved_tensors
        sums = [torch.empty_like(logs)]  # sum of gradient x output, per row
        if ctx.flash:
            sums.append(query.new_empty(query.shape, dtype=torch.float32))
        if (
            query.shape[-3] != key.shape[-3]
        ):  # one gradient per query head of a shared key, before they are summed
            sums += [one.new_empty((*query.shape[:-2], *one.shape[-2:])) for one in (key, value)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None
