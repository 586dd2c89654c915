"""LoRA adapters of sharded experts' parameters (`target_parameters` in PEFT).

To a tensor with a row for each expert, PEFT adds the product of two smaller tensors, which have rows for all
experts. These stay unsharded on every rank, like other small parameters, and a rank uses the rows of its own
experts. The usual reduction over ranks then sums their gradients over all tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from launcher.tensor.adapters import OF_PARAMETERS
from launcher.tensor.split import DimSlice

_MADE_BY = ("get_delta_factors", "get_delta_weight")


def adapters_in(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Map every module with adapted parameters to its wrappers, each of which adapts one parameter."""
    found: dict[nn.Module, list[nn.Module]] = {}
    for module in model.modules():
        if type(module).__name__ == OF_PARAMETERS:
            adapter: Any = module
            found.setdefault(adapter.get_base_layer(), []).append(module)
    return found


def take_rows(adapter: Any, rows: DimSlice) -> None:
    """Restrict an adapter, which has rows for all experts, to those of some experts."""
    for name in _MADE_BY:
        if hasattr(adapter, name):  # versions of PEFT have one or both
            setattr(adapter, name, partial(_taken, getattr(adapter, name), slice(rows.start, rows.stop)))


def _taken(make: Any, rows: slice, *args: Any, **keywords: Any) -> Any:
    made = make(*args, **keywords)
    if isinstance(made, tuple):  # two factors and their scaling
        left, right, scaling = made
        return left[rows], right[rows], scaling
    return made[rows]
