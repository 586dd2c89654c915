"""The names in a model's state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


def persistent_buffers(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for the buffers that state_dict() contains."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def persistent(model: nn.Module, *, every_name: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all parameters and persistent buffers: tied parameters once, or under every name."""
    yield from model.named_parameters(remove_duplicate=not every_name)
    yield from persistent_buffers(model)


def places_of(model: nn.Module) -> Callable[[str], int]:
    """Return a function from a name to its index in the current state_dict(); names added later come last."""
    names = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None and key not in module._non_persistent_buffers_set
    ]
    places = {name: place for place, name in enumerate(names)}
    return lambda name: places.get(name, len(places))
