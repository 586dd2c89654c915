"""Finds the experts of a transformers model, and the arguments of their calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from launcher.models.units import SPREAD, holds_experts


def experts_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that hold the experts of a layer, with their names."""
    return [(name, module) for name, module in model.named_modules() if holds_experts(module)]


def number_of(module: nn.Module) -> int:
    """Return the number of a layer's experts on all ranks together; 0 if the module does not define it."""
    count: Any = getattr(module, SPREAD, getattr(module, "num_experts", 0))
    return int(count)


def keep(module: nn.Module, count: int) -> None:
    """Record that this rank has only `count` of a module's experts."""
    setattr(module, SPREAD, number_of(module))
    module.num_experts = count  # type: ignore[assignment]


def arguments_of(
    module: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden states [..., H], experts of each token [..., k], their weights [..., k]) of a call.
    Models name these arguments differently, but all use this order."""
    names = list(inspect.signature(type(module).forward).parameters)[1:4]
    given = dict(zip(names, args, strict=False)) | dict(keywords)
    hidden, index, weights = (given[name] for name in names)
    return hidden, index, weights
