"""The kernels of scaled dot-product attention that a device has, and what each keeps from its forward to its backward.

    flash       output and a logarithm a row; a backward sums the gradient of queries in fp32. No mask; fp16 and bf16
    efficient   the same, in fp32 too, with masks; the backward sums in fp32 only where the inputs are
    math        the matrices of scores: what torch takes where no other kernel can be used
    cpu         whatever torch does on the CPU that makes the estimate

torch takes the first that can compute an attention (torch.backends.cuda, in its own order of preference).
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
"""Numbers of a head that flash takes at most."""


def choose_kernel(
    available: Collection[str], query: Tensor, *, masked: bool = False, grouped: bool = False
) -> str:
    """Return the kernel that torch takes.

    Args:
        available: those of the device.
        query: [..., heads, tokens, size of a head].
        masked: a tensor says who sees whom.
        grouped: several heads of queries read the same keys, without these being repeated.
    """
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    if "flash" in available and narrow and not masked and query.shape[-1] <= WIDEST:
        return "flash"
    if "efficient" in available and not grouped and (narrow or query.dtype is torch.float32):
        return "efficient"
    return "cpu" if "cpu" in available else "math"


@contextmanager
def attention_of(available: Collection[str], used: set[str]) -> Iterator[None]:
    """Inside, attention takes the memory that it takes on a device.

    A torch function mode would not do: it is off inside of a backward, where blocks are recomputed.

    Args:
        available: kernels of the device.
        used: gets the names of those that were.
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
    """The memory of a kernel that keeps no scores: tensors as large as its own, with nothing computed."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, flash: bool
    ) -> Tensor:
        *batch, heads, tokens, _ = query.shape
        laid_out = (*batch, tokens, heads, value.shape[-1])  # as kernels write it: no copy follows
        out = query.new_empty(laid_out).transpose(-3, -2)
        logs = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logs, *(() if mask is None else (mask,)))
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, _, logs, *_ = ctx.saved_tensors
        sums = [torch.empty_like(logs)]  # of a row: gradient x output
        if ctx.flash:
            sums.append(query.new_empty(query.shape, dtype=torch.float32))
        if (
            query.shape[-3] != key.shape[-3]
        ):  # first a gradient from each head that reads a key, then their sum
            sums += [one.new_empty((*query.shape[:-2], *one.shape[-2:])) for one in (key, value)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None
