"""Computes experts on the rows that a rank received: `experts_on_sorted`, registered with transformers."""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from launcher.experts.counts import counts_of

NAME = "launcher_sorted"
STANDS_FOR = "grouped_mm"


def install(module: nn.Module) -> None:
    """Use `experts_on_sorted` for the experts of a layer, if transformers would use its `grouped_mm`. The latter
    also sorts rows, weights them and sums them per token, which `dispatch` and `combine` do here.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    config: Any = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) != STANDS_FOR or not hasattr(F, "grouped_mm"):
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_on_sorted)
    own = copy.copy(config)  # for this layer only: the model's config is saved, and records the user's choice
    own._experts_implementation_internal = NAME
    module.config = own


def experts_on_sorted(module: Any, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Apply its expert to each row: [pairs, H] -> [pairs, H].

    Args:
        module: the experts, with the attributes of transformers' `use_experts_implementation`.
        index: [pairs, 1], the expert of each row, sorted.
        weights: [pairs, 1], all 1.
    """
    expert = index[:, 0]
    ends = counts_of(expert, module.num_experts).cumsum(0).int()
    inner = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", rows, expert, ends)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _linear(module, "down_proj", inner, expert, ends)
    if getattr(module, "has_post_expert_norm", False):  # newer than transformers 5.17
        out = module.post_expert_norm(out)
    return out


def _linear(module: Any, name: str, rows: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [pairs, in] by the weights of their experts: return [pairs, out].

    Args:
        expert: [pairs], sorted.
        ends: [experts], the end of each expert's rows.
    """
    weight = getattr(module, name)
    weight = weight if module.is_transposed else weight.transpose(1, 2)  # [experts, in, out]
    out = F.grouped_mm(rows.to(weight.dtype), weight, offs=ends)
    return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out
