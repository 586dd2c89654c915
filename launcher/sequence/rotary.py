"""Rotary embeddings whose frequencies depend on the sequence length (transformers' `dynamic`, `longrope`).

They infer the length from the largest position that they are called with. A rank has only some of the
positions, so the largest position of the full sequence is appended, and its embedding is dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from launcher.sequence.inputs import POSITIONS, current

_PLACE = 1  # index of the positions among the forward's arguments


def follow_length(model: nn.Module) -> list[RemovableHandle]:
    """Make a model's rotary embeddings use the full sequence length; return the handles of the hooks."""
    handles: list[RemovableHandle] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any("dynamic" in str(kind) or kind == "longrope" for kind in kinds):
            handles.append(module.register_forward_pre_hook(_with_largest, with_kwargs=True))
            handles.append(module.register_forward_hook(_without_largest))
    return handles


def _with_largest(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    sequence = current.get()
    if sequence is None:
        return None
    named = POSITIONS in keywords
    positions: Tensor = keywords[POSITIONS] if named else args[_PLACE]  # [B, S / degree]
    largest = sequence.places.max().to(positions.dtype).expand(*positions.shape[:-1], 1)
    longer = torch.cat([positions, largest], -1)
    if named:
        return args, {**keywords, POSITIONS: longer}
    return (*args[:_PLACE], longer, *args[_PLACE + 1 :]), keywords


def _without_largest(module: nn.Module, args: Any, output: Any) -> Any:
    if current.get() is None:
        return None
    return tree_map(lambda x: x[:, :-1], output)  # cos and sin: [B, S / degree + 1, width]
