"""Names of the tensors of a script's own experts, in the model and in files.

In the model, one tensor has a row for each expert of a layer (`experts/stacked.py`). In files, each expert
has its own tensor, under DeepSpeed's name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

JOINED = "__"
"""Replaces the dots in the name of an expert's parameter."""

_MODULE, _ONE = "deepspeed_moe.experts.", "deepspeed_experts."


EXPERT = re.compile(rf"(.*\b{re.escape(_MODULE)}){re.escape(_ONE)}(\d+)\.(.*)")
"""Matches the name of a single expert's tensor. Groups: its layer, its number, and its name in the expert."""


def stacked_name(name: str) -> str:
    """Return the model's name for a tensor of a file: unchanged if the tensor is not an expert's."""
    match = EXPERT.fullmatch(name)
    return f"{match[1]}{match[3].replace('.', JOINED)}" if match else name


def names_apart(name: str, experts: int) -> list[str]:
    """Return the names in files of the experts stacked in a tensor; [] if it does not stack experts."""
    before, module, key = name.rpartition(_MODULE)
    if not module or "." in key:
        return []
    return [f"{before}{module}{_ONE}{expert}.{key.replace(JOINED, '.')}" for expert in range(experts)]


def apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a tensor of the model in the layout of files: the tensor itself, or one tensor per expert."""
    names = names_apart(name, len(value)) if value.dim() else []
    return dict(zip(names, value.unbind(0), strict=True)) if names else {name: value}


def all_apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of the model in the layout of files."""
    return {key: part for name, value in state.items() for key, part in apart(name, value).items()}
