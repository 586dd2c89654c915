"""Rules of a plan, and short ways to write rows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SplitRule:
    """The split of one module or parameter.

    A number may be given as a string: then it names one of the model's config, as in `attn_config.kv_n_heads`.

    Args:
        style: a key of launcher.tensor.styles.STYLES.
        packed: proportions of the matrices that lie end to end along the split dim; each is split by itself.
        repeat: how often they lie there.
        divide: attributes of the module that count what is split (heads, features): divided by the degree.
            `config.x` is number x of the config that the module looks at.
        replicates: fewer of them than ranks (key-value heads) are held by several ranks each.
        heads: keyword arguments -> the dim that counts heads, or batch x heads, where it does not only stand for all of
            them; for style "heads". How many heads there are is what the first attribute of `divide` says.
        grain: how many features stay together: an attribute of the attention that the module is in, which says it of
            projections with a common name by itself (`counts.head_size`).
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


# name pattern -> a style's name, or a rule where the style needs to know more
TensorParallelPlan = Mapping[str, str | SplitRule]


@dataclass(frozen=True)
class ConfigCase:
    """Rows for models whose config says so.

    Args:
        when: attribute of the config -> its value; all must agree.
    """

    plan: TensorParallelPlan
    when: Mapping[str, object] = field(default_factory=dict)


def at(place: str, **names: str) -> dict[str, str | SplitRule]:
    """Return the rows for what is inside of `place`: style -> names."""
    return {f"{place}.{name}": style for style, joined in names.items() for name in joined.split()}


def counts(place: str, attributes: str, **others: object) -> dict[str, str | SplitRule]:
    """Return a row for a module whose attributes count heads or features."""
    return {place: SplitRule("heads", divide=tuple(attributes.split()), **others)}  # type: ignore[arg-type]


def inside(place: str, plan: TensorParallelPlan) -> dict[str, str | SplitRule]:
    """Return the rows of a plan, one level up."""
    return {f"{place}.{name}": row for name, row in plan.items()}


def whole(place: str, columns: str, rows: str) -> dict[str, str | SplitRule]:
    """Return rules for attention whose heads its code cannot split: parameters are, and it computes all heads on every
    rank."""
    return at(place, colwise_gather_output=columns, rowwise_split_input=rows)
