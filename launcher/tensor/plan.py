"""The plan of a model: which modules and parameters are split, and how. Plans are data.

A plan maps name patterns to rules. `*` matches a number, as in `model.layers.*.self_attn.q_proj`; at the
start of a pattern it matches any path. A pattern may match a module or a parameter. Whatever no pattern
matches is replicated.

A plan combines, in increasing precedence, the model's own plan (`tp_plan` of transformers' models;
`base_model_tp_plan` of the config and `_tp_plan` of any other model), the rows of this package's table
(`plans.py`), and the rules of the config (`user_plan.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from launcher.config import PartitionConfig
from launcher.errors import ConfigError, first_names
from launcher.models.units import transformers_model_in
from launcher.tensor.adapters import modules_before_peft, parameters_before_peft
from launcher.tensor.plans import PLANS, WITHOUT_PLAN
from launcher.tensor.rule import SplitRule
from launcher.tensor.styles import STYLES, split_dim
from launcher.tensor.user_plan import UserRule, check_rules, dim_along, rule_for, rules_of, sizes_along

WHERE = "tensor_parallel.autotp_size"


def model_type_of(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__


def plan_of(model: nn.Module, own: PartitionConfig | None = None) -> dict[str, SplitRule]:
    """Return the plan of a model: pattern of full names -> rule; the first match applies.

    Args:
        own: rules of the config, which come first.

    Raises:
        ConfigError: there is no plan, or a rule of the config does not fit the model.
    """
    inner = transformers_model_in(model)
    kind = model_type_of(inner)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is inner)
    rows = {
        pattern if pattern.startswith("*.") else prefix + pattern: row
        for pattern, row in {**_of_model(inner), **_of_table(inner, kind)}.items()
    }
    plan = {pattern: row if isinstance(row, SplitRule) else SplitRule(row) for pattern, row in rows.items()}
    if own is not None:
        return {**_rows_of(own, model, kind, planned=_named(plan, model)), **plan}
    # Every transformers plan has a row for the head, which alone does not make a plan.
    if not _named({pattern: rule for pattern, rule in plan.items() if "head" not in pattern}, model):
        why = f": {WITHOUT_PLAN[kind]}" if kind in WITHOUT_PLAN else ""
        raise ConfigError(
            f"no tensor-parallel plan for models of type {kind}{why}",
            where=WHERE,
            fix=_how_to_write_one(model),
        )
    return plan


def _named(plan: Mapping[str, SplitRule], model: nn.Module) -> set[str]:
    """Return the names of the modules and parameters that a plan matches."""
    names = [*dict(modules_before_peft(model)), *parameters_before_peft(model)]
    patterns = [matching(pattern) for pattern in plan]
    return {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}


def _rows_of(own: PartitionConfig, model: nn.Module, kind: str, planned: set[str]) -> dict[str, SplitRule]:
    """Return the rules of the config as rows of a plan. The key is the module whose weight a rule matches, or
    for parameters of other modules the parameter itself."""
    rules = rules_of(own, kind)
    weights = {
        f"{name}.weight": module
        for name, module in modules_before_peft(model)
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding))
    }
    linear = [name for name, module in weights.items() if not isinstance(module, nn.Embedding)]
    parameters = parameters_before_peft(model)
    known = planned | {f"{name}.weight" for name in planned}
    check_rules(own, rules, list(parameters), linear, known)
    rows = {}
    for name, parameter in parameters.items():
        rule, module = rule_for(rules, name), weights.get(name)
        if rule is None or (module is None and f"{name.rpartition('.')[0]}.weight" in weights):  # a bias
            continue
        style = _style_of(rule, module)
        dim = split_dim(STYLES[style], module, parameter)
        packed = (1,) if dim is None else sizes_along(rule, parameter.shape)
        if dim is not None and dim_along(rule, parameter.shape) != dim:
            raise ConfigError(
                f'"{rule.kind}" splits dim {dim} of {name}, but the rule specifies dim '
                f"{dim_along(rule, parameter.shape)}",
                where=rule.where,
                fix="remove partition_dim, or use the other partition_type",
            )
        owner = name.rpartition(".")[0]
        if module is None and rule.kind == "skip" and rule.where:
            rows[owner] = SplitRule("replicate")  # overrides the plan's rule for the module
        rows[owner if module else name] = SplitRule(style, packed if len(packed) > 1 else (1,))
    return rows


def _style_of(rule: UserRule, module: nn.Module | None) -> str:
    if rule.kind == "skip":
        return "replicated_with_grad_allreduce" if rule.grad_allreduce else "replicate"
    if isinstance(module, nn.Embedding):
        return "embedding_rowwise" if rule.dim in (None, 0) else "embedding_colwise"
    if rule.kind == "row":
        return "rowwise"
    return "colwise_gather_output" if rule.gather_output else "colwise"


def number_of(config: Any, name: str) -> int:
    """Return a number from a config, or from a nested config: `attn_config.kv_n_heads`."""
    return int(attrgetter(name)(config))


def _of_model(model: nn.Module) -> dict[str, str]:
    """Return the model's own plan; transformers collects those of its modules in `tp_plan`."""
    gathered: Any = getattr(model, "tp_plan", None)
    if gathered is not None:
        return dict(gathered)
    of_config = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    rows = {**(of_config or {}), **(getattr(model, "_tp_plan", None) or {})}
    unknown = sorted({style for style in rows.values() if style not in STYLES})
    if unknown:
        raise ConfigError(
            f"the plan of {type(model).__name__} uses unknown styles: {', '.join(unknown)}",
            where=WHERE,
            fix=f"use one of {', '.join(STYLES)}",
        )
    return rows


def _of_table(model: nn.Module, kind: str) -> dict[str, str | SplitRule]:
    names = (getattr(model, "base_model_prefix", ""), "model")
    prefix = next((f"{name}." for name in names if name and hasattr(model, name)), "")
    return {
        prefix + pattern: row
        for case in PLANS.get(kind, ())
        if all(getattr(model.config, name, None) == value for name, value in case.when.items())
        for pattern, row in case.plan.items()
    }


def matching(pattern: str) -> re.Pattern[str]:
    """Return the pattern as a regular expression on whole names."""
    path, rest = (".+", pattern[1:]) if pattern.startswith("*.") else ("", pattern)
    return re.compile(path + re.escape(rest).replace(r"\*", r"\d+"))


def _how_to_write_one(model: nn.Module) -> str:
    linears = {name for name, module in modules_before_peft(model) if isinstance(module, nn.Linear)}
    names = sorted({re.sub(r"\d+", "*", name) for name in linears})
    return (
        'add tensor_parallel.partition_config.layer_specs: {"patterns": [REGEX], "partition_type": '
        '"column"} for projections that produce heads or features, "row" for those that consume them. '
        f"Its linear layers are: {first_names(names, 12)}"
    )
