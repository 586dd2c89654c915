"""The plan of a model: which modules and parameters are split, and how. Plans are data.

A plan maps name patterns to rules. `*` stands for a number, as in `model.layers.*.self_attn.q_proj`. A pattern may name
a module or a parameter. What no pattern names is replicated.

A plan is the model's own in transformers (`base_model_tp_plan`), with the rows of our table (`plans.py`) over it.
"""

from __future__ import annotations

import re

from torch import nn

from launcher.errors import ConfigError
from launcher.tensor.plans import PLANS, Rule

WHERE = "tensor_parallel.autotp_size"


def model_type_of(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__


def plan_of(model: nn.Module) -> dict[str, Rule]:
    """The plan of a model, by full name patterns.

    Raises:
        ConfigError: there is none.
    """
    kind = model_type_of(model)
    rows = {**(getattr(model, "tp_plan", None) or {}), **PLANS.get(kind, {})}
    # every HF plan gets a row for the head: alone it is no plan
    if not any("head" not in pattern for pattern in rows):
        raise ConfigError(
            f"nobody has written how to split a model of type {kind} over tensor-parallel ranks",
            where=WHERE,
            fix=_how_to_write_one(model),
        )
    return {pattern: row if isinstance(row, Rule) else Rule(row) for pattern, row in rows.items()}


def matching(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression on whole names."""
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def _how_to_write_one(model: nn.Module) -> str:
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = sorted({re.sub(r"\d+", "*", name) for name in linears})
    return (
        'write tensor_parallel.partition_config.layer_specs: {"patterns": [REGEX], "partition_type": "column"} for '
        'projections that make heads or features, "row" for those that read them. Its linear layers are: '
        f"{', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
    )
