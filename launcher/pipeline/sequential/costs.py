"""Costs of the layers of a `PipelineModule`, by the methods of `pipeline.partition`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from launcher.config.parallelism import TYPE, method_of
from launcher.pipeline.partition.costs import elements, matcher, no_match, no_method, not_measured, products
from launcher.pipeline.sequential.specs import LayerSpec, PipelineLayer, class_of

LayerSize = tuple[int, float]
"""Number of elements of a layer's parameters, and of its weights that every token is multiplied with."""


def known_method(method: str) -> str:
    """Return the canonical spelling of a method.

    Raises:
        ConfigError: the method is unknown.
    """
    found = method_of(method)
    if found is None:
        raise no_method(method)
    return found


def sizes_of(layers: Sequence[PipelineLayer], module_of: Callable[[int], nn.Module]) -> list[LayerSize]:
    """Return the size of each layer; `module_of`: index -> module of the layer, on meta or not."""
    sizes: list[LayerSize] = []
    for index, (source, home) in enumerate(layers):
        if not isinstance(source, LayerSpec | nn.Module):
            sizes.append((0, 0.0))
            continue
        module = module_of(home)
        sizes.append((elements([module]), products(module, as_head=home != index)))
    return sizes


def costs_of(
    method: str,
    layers: Sequence[PipelineLayer],
    sizes: Callable[[], list[LayerSize]],
    measured: Sequence[float] | None,
) -> list[float]:
    """Return the cost of each layer, in the unit of the method: 1, elements, operations of a token, or
    seconds.

    Args:
        sizes: called only if sizes are needed, because modules must be built for them.
        measured: measured seconds, for "profile".

    Raises:
        ConfigError: no layer matches "type:REGEX", or "profile" without measurements.
    """
    if method == "uniform":
        return [1.0] * len(layers)
    if method == "parameters":
        return [float(size) for size, _ in sizes()]
    if method == "best":
        return [2 * weights for _, weights in sizes()]
    if method == "profile":
        if measured is None or len(measured) != len(layers):
            raise not_measured(f"{len(layers)} layers", None if measured is None else len(measured))
        return list(measured)
    pattern, names = method.removeprefix(TYPE), [class_of(layer.source) for layer in layers]
    matches = matcher(pattern)
    costs = [float(matches(name) is not None) for name in names]
    if not any(costs):
        raise no_match(pattern, names)
    return costs
