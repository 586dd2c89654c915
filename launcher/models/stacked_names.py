"""Names of the tensors of a script's own experts: in the model one tensor has a row for each expert of a layer
(`experts/stacked.py`); in files each expert has its own, under DeepSpeed's name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

JOINED = "__"
"""In a name, for the point between a module of an expert and its parameter."""

_MODULE, _ONE = "deepspeed_moe.experts.", "deepspeed_experts."


EXPERT = re.compile(rf"(.*\b{re.escape(_MODULE)}){re.escape(_ONE)}(\d+)\.(.*)")
"""Of the name of a single expert's tensor: its layer, its number, and its name in the expert."""


def stacked_name(name: str) -> str:
    """Return the name in the model of a tensor of a file; it may be that of no expert."""
    match = EXPERT.fullmatch(name)
    return f"{match[1]}{match[3].replace('.', JOINED)}" if match else name


def names_apart(name: str, experts: int) -> list[str]:
    """Return the names of the tensors of single experts that a tensor of the model stands for; none where it is no such
    tensor."""
    before, module, key = name.rpartition(_MODULE)
    if not module or "." in key:
        return []
    return [f"{before}{module}{_ONE}{expert}.{key.replace(JOINED, '.')}" for expert in range(experts)]


def apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a tensor of the model as files have it: itself, or one for each expert."""
    names = names_apart(name, len(value)) if value.dim() else []
    return dict(zip(names, value.unbind(0), strict=True)) if names else {name: value}


def all_apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of the model as files have it."""
    return {key: part for name, value in state.items() for key, part in apart(name, value).items()}
