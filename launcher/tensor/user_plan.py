"""Rules in the config for splitting parameters: `tensor_parallel.partition_config`.

A rule describes a weight as in DeepSpeed: `shape` is a view of it, of which one dim is split. This module
converts that to what the layers need: the dim of the parameter itself, and the sizes of the matrices that are
packed along it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from launcher.config import PartitionConfig
from launcher.config.parallelism import PartitionKind, SubParamShape
from launcher.errors import ConfigError, first_names

RULES = "tensor_parallel.partition_config.layer_specs"


@dataclass(frozen=True)
class UserRule:
    """One pattern of one rule.

    Args:
        pattern: matches parameter names from their start.
        kind: "column": split outputs; "row": split inputs; "skip": do not split.
        shape: a view of the parameter; an inner tuple, or a number at `dim`, specifies what is packed there;
            None: nothing is packed.
        dim: the split dim of `shape`, else of the parameter; None: 0 for "column" and 1 for "row", of a
            weight [out, in].
        gather_output: every rank gets the whole output.
        grad_allreduce: sum the gradients of a skipped parameter over the ranks.
        where: location of the rule in the config, for messages; "" for the final rule that matches everything
            else.
    """

    pattern: re.Pattern[str]
    kind: PartitionKind = "skip"
    shape: SubParamShape | None = None
    dim: int | None = None
    gather_output: bool = False
    grad_allreduce: bool = False
    where: str = ""


def rules_of(config: PartitionConfig, model_type: str) -> list[UserRule]:
    """Return the rules for models of this type, in order; the first rule that matches a parameter applies.

    With `use_default_specs` false, a final rule skips all other parameters, so that the model's own plan is
    unused.
    """
    rules = []
    for place, spec in enumerate(config.layer_specs):
        if spec.model_types and model_type.lower() not in {kind.lower() for kind in spec.model_types}:
            continue
        for i, pattern in enumerate(spec.patterns):
            rules.append(
                UserRule(
                    re.compile(pattern),
                    spec.partition_type,
                    spec.shape,
                    spec.partition_dim,
                    spec.gather_output,
                    spec.grad_allreduce,
                    f"{RULES}[{place}].patterns[{i}]",
                )
            )
    return rules if config.use_default_specs else [*rules, UserRule(re.compile(""))]


def rule_for(rules: Iterable[UserRule], name: str) -> UserRule | None:
    """Return the rule of the parameter `name`; None if no rule matches it."""
    return next((rule for rule in rules if rule.pattern.match(name)), None)


def check_rules(
    config: PartitionConfig,
    rules: Collection[UserRule],
    names: Collection[str],
    linear: Iterable[str] = (),
    planned: Collection[str] = (),
) -> None:
    """Reject rules that do not fit a model.

    Args:
        config: specifies `strict_mode`.
        rules: from `rules_of`.
        names: names of all parameters.
        linear: names of the weights of linear layers, which `strict_mode` checks.
        planned: parameters that the model's own plan matches.

    Raises:
        ConfigError: a rule matches no parameter, or in strict mode a linear layer has none.
    """
    for rule in rules:
        if not any(rule.pattern.match(name) for name in names):
            raise ConfigError(
                f'"{rule.pattern.pattern}" matches no parameter; the parameters are {first_names(names)}',
                where=rule.where,
                fix="correct or remove the pattern; it must match from the start of the name",
            )
    if not config.strict_mode:
        return
    spoken = [rule for rule in rules if rule.where]
    known = planned if config.use_default_specs else ()
    left = [name for name in linear if rule_for(spoken, name) is None and name not in known]
    if left:
        raise ConfigError(
            f"strict_mode: {len(left)} weights of linear layers have no rule: {first_names(left)}",
            where="tensor_parallel.partition_config.strict_mode",
            fix='add rules for them ("partition_type": "skip" leaves them unsplit), or set '
            '"strict_mode": false',
        )


def dim_along(rule: UserRule, param_shape: Sequence[int]) -> int:
    """Return the dim of the parameter that the rule splits.

    Raises:
        ConfigError: the rule does not fit a parameter of this shape.
    """
    return _packed(rule, tuple(param_shape))[0]


def sizes_along(rule: UserRule, param_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the matrices packed along the split dim, in order; each is split. A single number:
    nothing is packed.

    The bias [out] of a weight [out, in] is packed like the weight, so `shape` may be that of the weight.

    Raises:
        ConfigError: the rule does not fit a parameter of this shape.
    """
    return _packed(rule, tuple(param_shape))[1]


def _packed(rule: UserRule, param: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    dim = rule.dim if rule.dim is not None else int(rule.kind == "row")
    if rule.shape is None:
        if dim >= len(param):
            raise _misfit(rule, param, f"dim {dim} is split, but does not exist")
        return dim, (param[dim],)
    view = rule.shape
    if len(param) == 1 and len(view) > 1:  # a bias
        view = view[:-1]
        if dim >= len(view):
            raise _misfit(
                rule, param, "the rule splits the input features of the layer, which a bias does not have"
            )
    sizes, parts = _resolved(rule, param, view, dim)
    at, first = 0, 0
    for i, size in enumerate(param):  # find the dims of the view whose product is this dim of the parameter
        last, most = first + 1, len(sizes) - (len(param) - 1 - i)  # each later dim needs at least one
        while last < most and (math.prod(sizes[first:last]) != size or sizes[last] == 1):
            last += 1
        if math.prod(sizes[first:last]) != size:
            raise _misfit(rule, param, f"the view {_text(sizes)} is not compatible with its dims")
        if first <= dim < last:
            at = i
            before, after = math.prod(sizes[first:dim]), math.prod(sizes[dim + 1 : last])
            parts = tuple(part * after for part in parts) * before
        first = last
    if first < len(sizes):
        raise _misfit(rule, param, f"the view {_text(sizes)} has more dims than it")
    return at, parts


def _resolved(
    rule: UserRule, param: tuple[int, ...], view: SubParamShape, dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the view with every -1 resolved, and the sizes packed at its `dim`."""
    split = view[dim]
    sizes = [sum(size) if isinstance(size, tuple) else size for size in view]
    if not isinstance(split, tuple):
        sizes[dim] = -1  # the number is a count of packed parts, or -1
    unknown = [i for i, size in enumerate(sizes) if size == -1]
    if len(unknown) == 1:
        known = math.prod(size for size in sizes if size != -1)
        sizes[unknown[0]] = math.prod(param) // known
    elif unknown and len(sizes) == len(param):
        sizes = [param[i] if i in unknown else size for i, size in enumerate(sizes)]
    elif unknown:
        raise _misfit(rule, param, "only one -1 can be inferred")
    if math.prod(sizes) != math.prod(param):
        raise _misfit(rule, param, f"the view {_text(sizes)} has a different number of elements")
    if isinstance(split, tuple):
        return tuple(sizes), split
    count = max(1, split)
    if sizes[dim] % count:
        raise _misfit(rule, param, f"{sizes[dim]} cannot be divided into {count} equal parts")
    return tuple(sizes), (sizes[dim] // count,) * count


def _misfit(rule: UserRule, param: Sequence[int], why: str) -> ConfigError:
    view = f"shape {_text(rule.shape)} and " if rule.shape else ""
    dim = f"partition_dim {rule.dim}" if rule.dim is not None else f'partition_type "{rule.kind}"'
    return ConfigError(
        f"{view}{dim} do not match the shape {_text(param)} of a matching parameter: {why}",
        where=rule.where,
        fix="correct the shape, or narrow the pattern",
    )


def _text(shape: Iterable[int | tuple[int, ...]] | None) -> str:
    return str([list(size) if isinstance(size, tuple) else size for size in shape or ()])
