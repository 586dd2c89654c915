"""Adapters of the experts' own parameters: `target_parameters` of PEFT's LoRA, where each rank has some of the experts.

PEFT adds to a tensor with a row for each expert the product of two smaller ones, which have rows for all experts. These
stay whole on every rank, as other small parameters do; a rank takes the rows of its own experts from them. So their
gradients are those of all tokens once they are summed up over ranks, as everywhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from launcher.tensor.split import DimSlice

_KIND, _MADE_BY = "ParamWrapper", ("get_delta_factors", "get_delta_weight")


def adapters_in(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Return, for the modules whose parameters are adapted, the modules around them that adapt one each."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for module in model.modules():
        if type(module).__name__ == _KIND:
            adapter: Any = module
            found.setdefault(adapter.get_base_layer(), []).append(module)
    return found


def take_rows(adapter: Any, rows: DimSlice) -> None:
    """Let an adapter apply to some experts of all that it has rows for."""
    for name in _MADE_BY:
        if hasattr(adapter, name):  # versions of PEFT have one or both
            setattr(adapter, name, partial(_taken, getattr(adapter, name), slice(rows.start, rows.stop)))


def _taken(make: Any, rows: slice, *args: Any, **keywords: Any) -> Any:
    made = make(*args, **keywords)
    if isinstance(made, tuple):  # two factors, and what they are multiplied with
        left, right, scaling = made
        return left[rows], right[rows], scaling
    return made[rows]
