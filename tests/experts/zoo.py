"""Tests every causal-LM type with experts, with these sharded over two ranks:

    python -m tests.experts.zoo [TYPE ...] [--ranks 4] [--write]

takes one step of a tiny model of each and compares the loss, every gradient and the router decisions with those of one
process. Fails if one differs, raises an error that is not a refusal, or has a verdict that differs from
`verdicts.tsv`; with --write it writes that file.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from launcher.experts.modules import arguments_of, experts_in
from launcher.models.activation import recomputing
from tests.sequence.zoo import main
from tests.tensor.zoo import CAUSAL_TYPES
from tests.tensor.zoo_tables import UNRUNNABLE

VERDICTS = Path(__file__).with_name("verdicts.tsv")
CONFIG = {"expert_parallel": {"size": 2}, "zero_optimization": {"stage": 1}}


def has_experts(kind: str) -> bool:
    """Return whether the code of the type contains experts."""
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    return "expert" in inspect.getsource(sys.modules[model.__module__]).lower()


def choices(model: nn.Module) -> list[list[Tensor]]:
    """Return the list that the next forward fills with the router decisions and weights of each layer. Only the first
    layer matches bitwise: sums over experts are rounded in a different order."""
    said: list[list[Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training and not recomputing() and torch.is_grad_enabled():
            said.append([part.detach().clone() for part in arguments_of(module, args, keywords)[1:]])

    for _, module in experts_in(model):
        module.register_forward_pre_hook(keep, prepend=True, with_kwargs=True)
    return said


TYPES = [kind for kind in CAUSAL_TYPES if kind not in UNRUNNABLE and has_experts(kind)]

if __name__ == "__main__":
    main(__doc__, VERDICTS, CONFIG, TYPES, choices)
