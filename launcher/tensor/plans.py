"""Our own plans, by model type: for models that have none in transformers, and where theirs can be bettered. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """How one module or parameter is split.

    Args:
        style: a key of launcher.tensor.styles.STYLES.
        packed: proportions of the matrices that lie end to end along the split dim; each is split by itself. A string
            names a number of the model's config.
        divide: attributes of the module that count what is split (heads, features): divided by the degree.
    """

    style: str
    packed: tuple[int | str, ...] = (1,)
    divide: tuple[str, ...] = ()


# name pattern -> a style's name, or a rule where the style needs to know more
Plan = Mapping[str, str | Rule]

PLANS: dict[str, Plan] = {}
