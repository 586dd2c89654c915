"""Linear layers that compute their products in float8 (the JSON's `fp8`), with torchao's training layers.

The layers are converted in place: parameters, names, hooks and references to them stay. ZeRO shards the same
parameters, a tensor-parallel layer runs the converted forward on its shard, and checkpoints do not differ.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from launcher.config.precision import Fp8Config
from launcher.errors import ConfigError
from launcher.models.units import ends_of, holds_experts

logger = logging.getLogger("launcher")

MULTIPLE = 16
"""Float8 products of GPUs need sizes that are multiples of it."""


def use_float8(
    model: nn.Module, section: Fp8Config, device: torch.device, *, degree: int = 1, talks: bool = True
) -> list[str]:
    """Convert the linear layers of `model` to float8 products, in place, and return their names.

    Args:
        degree: the tensor-parallel degree; sizes must be multiples of 16 on every rank.
        talks: log what was converted.

    Raises:
        ConfigError: torchao is missing, a name in `exclude` matches nothing, or no layer can be converted.
    """
    linear, step = dict(_linear_layers(model)), MULTIPLE * degree
    excluded = _excluded(linear, section.exclude)
    chosen = {
        name: layer
        for name, layer in linear.items()
        if name not in excluded and layer.in_features % step == 0 and layer.out_features % step == 0
    }
    if not chosen:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer whose sizes are multiples of {step}",
            where="fp8.enabled",
            fix="delete fp8" + (", or lower the tensor-parallel degree" if degree > 1 else ""),
        )
    settings = _settings(section.recipe, device)
    for layer in chosen.values():
        _convert(layer, settings)
    if talks:
        _log(chosen, linear, section.recipe, emulated=settings.emulate)
    return list(chosen)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the plain linear layers, but for the output head, routers and the factors of adapters."""
    _, head = ends_of(model)
    skipped = {head, *_routers(model), *_adapters(model)}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in skipped:
            yield name, module


def _routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules next to the experts of a layer."""
    for module in model.modules():
        if any(holds_experts(child) for child in module.children()):
            yield from module.children()


def _adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that PEFT has added to the layers of the model."""
    for module in model.modules():
        if hasattr(module, "adapter_layer_names"):
            for name, child in module.named_children():
                if name != "base_layer":
                    yield from child.modules()


def _excluded(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    found = {pattern: {name for name in names if _matches(name, pattern)} for pattern in patterns}
    for pattern, matched in found.items():
        if not matched:
            raise ConfigError(
                f"{pattern!r} matches no linear layer that would be converted",
                where="fp8.exclude",
                fix=f"the model has, for example, {', '.join([*names][:3]) or 'no such layers'}",
            )
    return set().union(*found.values())


def _log(chosen: Collection[str], linear: Collection[str], recipe: str, *, emulated: bool) -> None:
    logger.info("fp8: %d of %d linear layers compute in float8 (%s)", len(chosen), len(linear), recipe)
    if emulated:
        logger.warning("fp8: this device has no float8 products: they are emulated, which is slow")


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in (name, *name.split(".")))


def _settings(recipe: str, device: torch.device) -> Any:
    """Return torchao's settings of a recipe, emulated on a device without float8 products."""
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise ConfigError(
            f"float8 products require torchao, which cannot be imported: {error}",
            where="fp8.enabled",
            fix="pip install torchao",
        ) from error
    settings = Float8LinearConfig.from_recipe_name(recipe)
    return settings if computes_float8(device) else replace(settings, emulate=True)


def computes_float8(device: torch.device) -> bool:
    """Return whether the device has float8 products: NVIDIA's from compute capability 8.9, AMD's from MI300."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_capability(device) >= (9, 4)
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _convert(layer: nn.Linear, settings: Any) -> None:
    """Give `layer` the class and the attributes of torchao's layer."""
    from torchao.float8 import convert_to_float8_training

    (converted,) = convert_to_float8_training(nn.Sequential(layer), config=settings)
    layer.__class__ = type(converted)
    own = vars(layer)
    own.update({name: value for name, value in vars(converted).items() if name not in own})


def cast_weights(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the weights that are used only as float8 with one scale per weight: name -> that dtype."""
    uses: dict[nn.Parameter, list[torch.dtype | None]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append(_cast_dtype(module) if name == "weight" else None)
    return {
        name: dtypes[0]
        for name, parameter in model.named_parameters()
        if (dtypes := uses[parameter])[0] is not None and set(dtypes) == {dtypes[0]}
    }


def _cast_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which a float8 layer casts its weight with one scale; None for any other module."""
    settings: Any = getattr(module, "config", None)
    forward = getattr(settings, "cast_config_weight", None)
    if forward is None or forward != settings.cast_config_weight_for_grad_input:
        return None
    tensorwise = (forward.scaling_type.value, forward.scaling_granularity.value) == ("dynamic", "tensorwise")
    return forward.target_dtype if tensorwise and not settings.round_scales_to_power_of_2 else None
