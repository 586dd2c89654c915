"""The plan of a model: which modules and parameters are split, and how. Plans are data.

A plan maps name patterns to rules. `*` stands for a number, as in `model.layers.*.self_attn.q_proj`. A pattern may name
a module or a parameter. What no pattern names is replicated.

Where a plan comes from: the model's own in transformers (`base_model_tp_plan`), and our table (`plans.py`) over it.
"""

from __future__ import annotations

import re
from itertools import chain
from operator import attrgetter
from typing import Any

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
    own: dict[str, str] = getattr(model, "tp_plan", None) or {}
    rows = {**own, **_of_table(model, kind)}
    names = [name for name, _ in chain(model.named_modules(), model.named_parameters())]
    # every HF plan gets a row for the head: alone it is no plan
    patterns = [matching(pattern) for pattern in rows if "head" not in pattern]
    if not any(pattern.fullmatch(name) for pattern in patterns for name in names):
        raise ConfigError(
            f"nobody has written how to split a model of type {kind} over tensor-parallel ranks",
            where=WHERE,
            fix=_how_to_write_one(model),
        )
    return {pattern: row if isinstance(row, Rule) else Rule(row) for pattern, row in rows.items()}


def number_of(config: Any, name: str) -> int:
    """A number of a config, or of a config inside of it: `attn_config.kv_n_heads`."""
    return int(attrgetter(name)(config))


def _of_table(model: nn.Module, kind: str) -> dict[str, str | Rule]:
    names = (getattr(model, "base_model_prefix", ""), "model")
    prefix = next((f"{name}." for name in names if name and hasattr(model, name)), "")
    return {
        prefix + pattern: row
        for case in PLANS.get(kind, ())
        if all(getattr(model.config, name, None) == value for name, value in case.when.items())
        for pattern, row in case.plan.items()
    }


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
