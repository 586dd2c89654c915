"""Specifications of the layers of a `PipelineModule`, and which of them share a module. DeepSpeed's names.

home   the index of the layer whose module a layer runs: its own, unless it is tied to an earlier one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from launcher.errors import ConfigError

Source: TypeAlias = "LayerSpec | nn.Module | Callable[..., Any]"
WHERE = "PipelineModule(layers=...)"


class LayerSpec:
    """A layer that is not built yet.

    Args:
        typename: a subclass of nn.Module.
        module_args, module_kwargs: its arguments.

    Raises:
        ConfigError: `typename` is not a subclass of nn.Module.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                f"{typename!r} is not a subclass of nn.Module",
                where=type(self).__name__,
                fix="pass the class followed by its arguments; put functions and modules into the list "
                "directly",
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer, with initial values from the current random state. `log` has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [
            *map(repr, self.module_args),
            *(f"{key}={value!r}" for key, value in self.module_kwargs.items()),
        ]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares one module with all layers of the same key, on any stage. The module is built with
    the arguments of the first of them.

    Args:
        key: identifies the layers that share a module.
        forward_fn: called as forward_fn(module, inputs) in place of the module.
        tied_weight_attr: an attribute, or several, that the module must have. All parameters of the module
            are tied; in DeepSpeed only these attributes are, between stages.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


class _Again(NamedTuple):
    """The key of a module that may occur twice; it cannot equal the key of a TiedLayerSpec."""

    identity: int


class PipelineLayer(NamedTuple):
    """One layer of the sequence: its source, and the home of its module."""

    source: Source
    home: int


def row_of(sources: Sequence[Any]) -> tuple[tuple[PipelineLayer, ...], dict[str, list[int]]]:
    """Return the layers, each with its home, and key -> indices of the layers that share a module."""
    layers: list[PipelineLayer] = []
    uses: dict[Any, list[int]] = {}
    for index, source in enumerate(sources):
        _check_source(index, source)
        own = any(True for _ in source.parameters()) if isinstance(source, nn.Module) else False
        key = source.key if isinstance(source, TiedLayerSpec) else _Again(id(source)) if own else None
        places = [index] if key is None else uses.setdefault(key, [])
        if key is not None:
            places.append(index)
        layers.append(PipelineLayer(source, places[0]))
        first = sources[places[0]]
        if isinstance(source, TiedLayerSpec) and first.typename is not source.typename:
            raise ConfigError(
                f"layers {places[0]} and {index} are tied by {source.key!r} but have different "
                f"classes: {first.typename.__name__} and {source.typename.__name__}",
                where="TiedLayerSpec",
                fix="tie layers of the same class; if the second one computes something else, pass a "
                "forward_fn",
            )
    _check_shared_parameters(layers)
    several = ((key, use) for key, use in uses.items() if len(use) > 1)
    return tuple(layers), {f"layer {use[0]}" if isinstance(key, _Again) else key: use for key, use in several}


def _check_source(index: int, source: Any) -> None:
    if not isinstance(source, LayerSpec) and not callable(source):
        raise ConfigError(
            f"layer {index} is {source!r}",
            where=WHERE,
            fix="use a LayerSpec, an nn.Module or a function",
        )


def _check_shared_parameters(layers: Sequence[PipelineLayer]) -> None:
    """Reject a parameter shared by two modules: on different stages, each would have its own copy of it."""
    seen: dict[int, int] = {}
    for index, (source, home) in enumerate(layers):
        if not isinstance(source, nn.Module):
            continue
        for name, parameter in source.named_parameters():
            other = seen.setdefault(id(parameter), home)
            if other != home:
                raise ConfigError(
                    f"layer {index} shares its parameter {name} with layer {other}, which may be on "
                    "another stage",
                    where=WHERE,
                    fix="write both as TiedLayerSpec with the same key; forward_fn defines what the "
                    "second one computes",
                )


def check_attributes(spec: TiedLayerSpec, module: nn.Module) -> None:
    """Check that the module has the tensors named by `tied_weight_attr`."""
    for name in spec.tied_weight_attr:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, torch.Tensor):
            raise ConfigError(
                f"{type(module).__name__} has no weight {name!r} to tie with key {spec.key!r}",
                where="TiedLayerSpec(tied_weight_attr=...)",
                fix="use one of "
                f"{', '.join(name for name, _ in module.named_parameters()) or 'its parameters'}",
            )


def class_of(source: Source) -> str:
    """Return the class name of a layer, or the name of a function."""
    if isinstance(source, LayerSpec):
        return source.typename.__name__
    return type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", "")
