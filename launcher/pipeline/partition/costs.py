"""Costs of layers by their shapes, and the methods that `pipeline.partition` knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from torch import nn

from launcher.config.parallelism import TYPE
from launcher.errors import ConfigError

WHERE = "pipeline.partition"


def elements(modules: Iterable[nn.Module], whole: Mapping[nn.Parameter, int] = MappingProxyType({})) -> int:
    """Return the elements of the parameters of `modules`, each parameter once; `whole` knows better."""
    found = {parameter for module in modules for parameter in module.parameters()}
    return sum(whole.get(parameter, parameter.numel()) for parameter in found)


def products(module: nn.Module, *, as_head: bool = False, experts: float = 1.0) -> float:
    """Return the elements of the weights inside that are multiplied with every token: matrices and kernels, no lookup
    tables.

    Args:
        as_head: the module's own weight is a matrix though the module is an embedding.
        experts: share of the experts that a token goes through.
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
    """Return a search for the regular expression of "type:REGEX" in the name of a class, upper or lower case."""
    try:
        return re.compile(pattern, re.IGNORECASE).search
    except re.error as error:
        what = f"{pattern!r} is not a regular expression: {error.msg}"
        raise ConfigError(what, where=WHERE, fix='write for example "type:decoderlayer"') from None


def no_method(method: str) -> ConfigError:
    """Return the error for an unknown method of dividing layers."""
    return ConfigError(
        f"unknown partition method {method!r} to divide layers",
        where=WHERE,
        fix='write "best", "uniform", "parameters", "profile" or "type:REGEX"',
    )


def no_match(pattern: str, classes: Iterable[str]) -> ConfigError:
    """Return the error for a pattern that matches no class of a layer."""
    return ConfigError(
        f'"{TYPE}{pattern}" matches no layer: their classes are {", ".join(dict.fromkeys(classes))}',
        where=WHERE,
        fix='write for example "type:" and one of these names',
    )


def not_measured(wanted: str, given: int | None) -> ConfigError:
    """Return the error for "profile" without numbers, or with too many or too few."""
    have = "none were given" if given is None else f"{given} were given"
    return ConfigError(
        f'"profile" needs the measured seconds of {wanted}, and {have}',
        where=WHERE,
        fix='measure, or write "best"',
    )
