"""A model on meta with the values that one process gives it: what every other way of making them must equal."""

from __future__ import annotations

import torch
from torch import nn

from launcher.models.initialize import initialize_module
from launcher.models.initialize_plan import plan_of


def materialize(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Turn a model on meta into a real one, in place, module by module.

    The one-process truth: after it `model` has the values that `initialize_module` gives under any
    topology, ties are intact and non-persistent buffers (rotary frequencies, masks) are right. Tensors not
    on meta stay as they are.
    """
    plan_of(model)  # while tied parameters are still one object
    made: dict[int, torch.Tensor] = {}
    for _, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                data = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            setattr(module, key, made[id(parameter)])
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
    for name, module in model.named_modules():
        initialize_module(model, name, module, seed)
