"""Layer costs from shapes, and the errors and patterns of the methods of `pipeline.partition`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from torch import nn

from launcher.config.parallelism import TYPE
from launcher.errors import ConfigError

WHERE = "pipeline.partition"


def elements(modules: Iterable[nn.Module], whole: Mapping[nn.Parameter, int] = MappingProxyType({})) -> int:
    """Return the number of parameter elements in `modules`, each parameter counted once; `whole` overrides
    the count of a parameter."""
    found = {parameter for module in modules for parameter in module.parameters()}
    return sum(whole.get(parameter, parameter.numel()) for parameter in found)


def products(module: nn.Module, *, as_head: bool = False, experts: float = 1.0) -> float:
    """Return the number of weight elements in `module` that every token is multiplied with: matrices and
    kernels, not lookup tables.

    Args:
        as_head: count the module's own weight as a matrix even if the module is an embedding.
        experts: share of the experts that a token is routed to.
    """
    total = 0.0
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Embedding) and not (as_head and inner is module):
            continue
        for key, parameter in inner.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                share = experts if "experts" in f"{name}.{key}".split(".") else 1.0
                total += share * parameter.numel()
    return total


def matcher(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Return a case-insensitive search for the regular expression of "type:REGEX" in a class name."""
    try:
        return re.compile(pattern, re.IGNORECASE).search
    except re.error as error:
        what = f"{pattern!r} is not a regular expression: {error.msg}"
        raise ConfigError(what, where=WHERE, fix='use for example "type:decoderlayer"') from None


def no_method(method: str) -> ConfigError:
    """Return the error for an unknown method of dividing layers."""
    return ConfigError(
        f"unknown partition method {method!r}",
        where=WHERE,
        fix='use "best", "uniform", "parameters", "profile" or "type:REGEX"',
    )


def no_match(pattern: str, classes: Iterable[str]) -> ConfigError:
    """Return the error for a pattern that matches no layer class."""
    return ConfigError(
        f'"{TYPE}{pattern}" matches no layer: their classes are {", ".join(dict.fromkeys(classes))}',
        where=WHERE,
        fix='use for example "type:" followed by one of these names',
    )


def not_measured(wanted: str, given: int | None) -> ConfigError:
    """Return the error for "profile" without measurements, or with the wrong number of them."""
    have = "none were given" if given is None else f"{given} were given"
    return ConfigError(
        f'"profile" needs the measured seconds of {wanted}, but {have}',
        where=WHERE,
        fix='measure the layers, or use "best"',
    )
