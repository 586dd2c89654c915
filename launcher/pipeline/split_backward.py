"""Linear layers whose backward has two parts: the gradient of the input, and later that of the weights.

While `SplitLinears` is on, F.linear and torch.addmm (GPT-2's Conv1D) on parameters become functions of our own. Weights
that are used in another way (norms, embeddings, experts in one batch) keep their whole backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from launcher.tensor.weight_gradients import put_off


class SplitLinears(TorchFunctionMode):
    """Inside, linear functions of leaves can put the gradients of these off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and torch.is_grad_enabled():
            if func is F.linear and _can_wait(args[1]):
                return _linear(args[0], args[1], args[2] if len(args) > 2 else None, transposed=False)
            if func is torch.addmm and len(args) == 3 and _can_wait(args[2]) and args[0].dim() == 1:
                return _linear(args[1], args[2], args[0], transposed=True)
        return func(*args, **(kwargs or {}))


def _can_wait(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.is_leaf and weight.requires_grad and weight.dim() == 2


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    made: Tensor = _SplitLinear.apply(x if dtype is None else x.to(dtype), weight, bias, transposed, dtype)
    return made


class _SplitLinear(torch.autograd.Function):
    """x [..., in] times a weight [out, in], or [in, out] where `transposed`, plus bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaf, ctx.bias, ctx.transposed = weight, bias, transposed
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            whole = weight.to(gradient.dtype)
            dx = gradient @ (whole.t() if ctx.transposed else whole)

        def of_weight(x: Tensor = x, dtype: torch.dtype = weight.dtype) -> Tensor:
            rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            return (inputs.t() @ rows if ctx.transposed else rows.t() @ inputs).to(dtype)

        if ctx.needs_input_grad[1] and not put_off(ctx.leaf, of_weight):
            dw = of_weight()
        if ctx.needs_input_grad[2]:
            db = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias.dtype)
        return dx, dw, db, None, None
