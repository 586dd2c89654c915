"""Costs of the blocks and the two ends of a Hugging Face model, from shapes alone: a model on meta is enough.

before   modules that run before the blocks: embeddings; on the first virtual stage
blocks   the blocks, in order
after    modules that run after the blocks: the last norm, the head; on the last virtual stage
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from launcher.config.parallelism import TYPE
from launcher.pipeline.hf.parts import ModelParts, parts_of
from launcher.pipeline.partition.best_cut import Balance, partition
from launcher.pipeline.partition.costs import elements, matcher, no_match, no_method, not_measured, products

_NO_SCORES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")
"""Layer types, as named in configs, whose cost is not quadratic in the sequence length."""


class LayerCosts(NamedTuple):
    """Costs in the unit of their method: 1 per layer, elements, operations, or seconds."""

    before: float
    blocks: tuple[float, ...]
    after: float


def deal(costs: LayerCosts, virtual_stages: int) -> list[int]:
    """Return the boundaries [virtual stages + 1] over the blocks, in model order; costs of stages include the
    ends.

    Raises:
        ConfigError: there are fewer blocks than virtual stages.
    """
    return partition(with_ends(costs), virtual_stages)


def model_costs(
    model: nn.Module, method: str, *, sequence: int = 2048, tp: int = 1, measured: LayerCosts | None = None
) -> LayerCosts:
    """Return the costs of a causal LM by a method of `pipeline.partition`.

    Args:
        model: a Hugging Face model, on meta or not, its layers split over tensor-parallel ranks or not.
        method: "best", "uniform", "parameters", "profile" or "type:REGEX".
        sequence: sequence length in tokens, for "best": determines the cost of attention scores.
        tp: number of ranks over which the layers of `model` are already split.
        measured: measured seconds, for "profile".

    Raises:
        ConfigError: the model has no blocks, no class matches the regular expression, nothing was measured,
            or the method is unknown.
    """
    parts = parts_of(model)
    if method == "uniform":
        return LayerCosts(0, (1,) * len(parts.blocks), 0)
    if method == "parameters":
        return _each(parts, elements)
    if method == "best":
        return _operations(model, parts, sequence, tp)
    if method.startswith(TYPE):
        return _matching(parts, method.removeprefix(TYPE))
    if method != "profile":
        raise no_method(method)
    if measured is None or len(measured.blocks) != len(parts.blocks):
        raise not_measured(f"{len(parts.blocks)} blocks", None if measured is None else len(measured.blocks))
    return measured


def balance(
    model: nn.Module,
    costs: LayerCosts,
    boundaries: Sequence[int],
    whole: Mapping[nn.Parameter, int] = MappingProxyType({}),
    *,
    seconds: bool = False,
) -> Balance:
    """Return the costs and parameters of each virtual stage; a tied embedding counts at both ends.

    Args:
        whole: parameter split over tensor-parallel ranks -> elements of its logical parameter.
        seconds: whether costs are in seconds.
    """
    counted = with_ends(_each(parts_of(model), lambda modules: elements(modules, whole)))
    of_stages = list(pairwise(boundaries))
    return Balance(
        tuple(boundaries),
        tuple(sum(with_ends(costs)[begin:end]) for begin, end in of_stages),
        tuple(int(sum(counted[begin:end])) for begin, end in of_stages),
        seconds=seconds,
    )


def _each(parts: ModelParts, cost: Callable[[Sequence[nn.Module]], float]) -> LayerCosts:
    before, blocks, after = ([module for _, module in part] for part in parts)
    return LayerCosts(cost(before), tuple(cost([block]) for block in blocks), cost(after))


def with_ends(costs: LayerCosts) -> list[float]:
    """Return the costs of the blocks, with those of the ends added to the first and the last block."""
    blocks = list(costs.blocks)
    blocks[0] += costs.before
    blocks[-1] += costs.after
    return blocks


def _operations(model: nn.Module, parts: ModelParts, sequence: int, tp: int) -> LayerCosts:
    """Return the operations of the forward of one sequence; the backward has twice as many, except in lookup
    tables."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    experts = _share_of_experts(text)

    def cost(modules: Sequence[nn.Module]) -> float:
        return 2 * sequence * sum(products(module, experts=experts) for module in modules)

    scores = 2 * sequence * sequence * _width_of_scores(text) / tp
    kinds = getattr(text, "layer_types", None) or ()
    found = _each(parts, cost)
    blocks = (
        block + (0 if index < len(kinds) and kinds[index] in _NO_SCORES else scores)
        for index, block in enumerate(found.blocks)
    )
    return LayerCosts(found.before, tuple(blocks), found.after)


def _width_of_scores(config: Any) -> int:
    """Return the elements per token, over all heads, that attention multiplies for the scores and for the
    outputs; 0 without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * (
        (getattr(config, "qk_head_dim", None) or size) + (getattr(config, "v_head_dim", None) or size)
    )


def _share_of_experts(config: Any) -> float:
    """Return the share of the routed experts that one token is routed to."""

    def first(*names: str) -> int:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)

    chosen = first("num_experts_per_tok", "moe_topk", "top_k_experts")
    number = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return min(1.0, chosen / number) if chosen and number else 1.0


def _matching(parts: ModelParts, pattern: str) -> LayerCosts:
    """Return 1 for each block of a matching class, and each end with a matching module with parameters."""
    matches = matcher(pattern)

    def cost(modules: Sequence[nn.Module]) -> float:
        return float(any(matches(type(module).__name__) for module in modules if elements([module])))

    found = _each(parts, cost)
    if not any(with_ends(found)):
        raise no_match(pattern, (type(module).__name__ for part in parts for _, module in part))
    return found
