"""Frozen weights of 4 bits (QLoRA) on meta: the tensors that bitsandbytes' `Linear4bit` holds and allocates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from launcher.errors import ConfigError
from launcher.models.adapters import LoraSettings, with_adapters
from launcher.models.build import build_on_meta

BLOCK, NESTED_BLOCK = 64, 256
"""Weights that share a scale, and scales that share one (`bnb_4bit_use_double_quant`)."""


class QuantState(NamedTuple):
    """What a packed parameter stands for: a weight of this shape."""

    shape: torch.Size


def adapted_on_meta(config: PretrainedConfig, settings: LoraSettings) -> nn.Module:
    """Return the model that a run with adapters trains; its frozen layers are packed if the settings say so."""
    model = with_adapters(build_on_meta(config), settings)
    return pack_frozen(model) if settings.load_in_4bit else model


def pack_frozen(model: nn.Module) -> nn.Module:
    """Replace the frozen linear layers of a model with LoRA adapters by layers of 4 bits per weight, in place.

    The output head stays as it is, as with transformers' `BitsAndBytesConfig(load_in_4bit=True)`.

    Raises:
        ConfigError: the model has no such layers.
    """
    base: Any = model
    head = base.get_output_embeddings()
    packed = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer is not head and not layer.weight.requires_grad:
                setattr(parent, name, Linear4bit(layer))
                packed += 1
    if not packed:
        raise ConfigError(
            "the model has no frozen linear layers to store in 4 bits",
            where="--load-in-4bit",
            fix="leave it out",
        )
    return model


def scale_bytes(model: nn.Module) -> int:
    """Return the bytes of the scales of packed weights, which every rank holds."""
    layers = (module for module in model.modules() if isinstance(module, Linear4bit))
    return sum(buffer.nbytes for layer in layers for buffer in layer.buffers(recurse=False))


class Linear4bit(nn.Module):
    """A frozen linear layer of 4 bits per weight with nested scales; its weight is unpacked for each product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        numel, device = linear.weight.numel(), linear.weight.device
        scales = -(-numel // BLOCK)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        packed = torch.empty(-(-numel // 2), 1, dtype=torch.uint8, device=device)
        weight: Any = nn.Parameter(packed, requires_grad=False)
        weight.quant_state = QuantState(linear.weight.shape)
        self.weight: nn.Parameter = weight
        # These are attributes of `quant_state` in bitsandbytes, so ZeRO does not shard them.
        nested = -(-scales // NESTED_BLOCK)
        self.register_buffer(
            "scales", torch.empty(scales, dtype=torch.uint8, device=device), persistent=False
        )
        self.register_buffer("nested", torch.empty(nested, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _UnpackedProduct.apply(x, self.weight, self.out_features)  # type: ignore[no-untyped-call]
        out = out if self.bias is None else out + self.bias
        return out.clone()  # by PEFT, before it adds the adapter


class _UnpackedProduct(torch.autograd.Function):
    """x [..., in] times the unpacked weight [out, in], which is unpacked again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = rows, x.shape[-1]
        return x @ x.new_empty(ctx.shape).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors  # unshards the packed weight
        return grad @ grad.new_empty(ctx.shape), None, None
