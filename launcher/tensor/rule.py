"""Rules of a plan, and helpers to write rows of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SplitRule:
    """The split of one module or parameter.

    A number may be given as a string, the name of a number in the model's config, such as
    `attn_config.kv_n_heads`.

    Args:
        style: a key of launcher.tensor.styles.STYLES.
        packed: proportions of the matrices that are packed along the split dim; each is split separately.
        repeat: how many times this packing is repeated along the dim.
        divide: attributes of the module that count what is split (heads, features), to be divided by the
            degree. `config.x` is number x of the config that the module reads.
        replicates: if there are fewer heads than ranks (key-value heads), several ranks hold each head.
        heads: for style "heads": keyword arguments -> their dim of heads, or batch x heads; a dim of size 1
            broadcasts and is not sliced. The first attribute of `divide` is the number of heads.
        grain: attribute of the enclosing attention module with the number of features that stay together. Not
            needed for projections with common names (`counts.head_size`).
        once: parameters of the module that are added to its output, which is summed over the ranks.
    """

    style: str
    packed: tuple[int | str, ...] = (1,)
    repeat: int | str = 1
    divide: tuple[str, ...] = ()
    replicates: bool = False
    heads: Mapping[str, int] = field(default_factory=dict)
    grain: str = ""
    once: tuple[str, ...] = ()


# name pattern -> name of a style, or a rule if the style needs parameters
TensorParallelPlan = Mapping[str, str | SplitRule]


@dataclass(frozen=True)
class ConfigCase:
    """Rows for models whose config matches.

    Args:
        when: config attribute -> required value; all must match.
    """

    plan: TensorParallelPlan
    when: Mapping[str, object] = field(default_factory=dict)


def at(place: str, **names: str) -> dict[str, str | SplitRule]:
    """Return the rows for modules or parameters inside of `place`; `names`: style -> names."""
    return {f"{place}.{name}": style for style, joined in names.items() for name in joined.split()}


def counts(place: str, attributes: str, **others: object) -> dict[str, str | SplitRule]:
    """Return a row for a module whose attributes count heads or features."""
    return {place: SplitRule("heads", divide=tuple(attributes.split()), **others)}  # type: ignore[arg-type]


def inside(place: str, plan: TensorParallelPlan) -> dict[str, str | SplitRule]:
    """Return the rows of a plan with `place` prefixed to their patterns."""
    return {f"{place}.{name}": row for name, row in plan.items()}


def whole(place: str, columns: str, rows: str) -> dict[str, str | SplitRule]:
    """Return rules for attention whose code cannot work on some of its heads: only parameters are split, and
    every rank computes all heads."""
    return at(place, colwise_gather_output=columns, rowwise_split_input=rows)
