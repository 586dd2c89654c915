"""Linear layers that compute their products in float8 (the JSON's `fp8`), with torchao's training layers.

The layers are converted in place: parameters, names, hooks and references to them stay. ZeRO shards the same
parameters, a tensor-parallel layer runs the converted forward on its shard, and checkpoints do not differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.config.precision import Fp8Config
from launcher.errors import ConfigError
from launcher.models.units import ends_of, holds_experts, transformers_model_in

logger = logging.getLogger("launcher")

MULTIPLE = 16
"""Float8 products of GPUs need sizes that are multiples of it."""

ROUTERS = frozenset({"gate", "router"})
"""Names of modules that choose experts."""


class Float8Layer(nn.Module):
    """Mixed into torchao's layer: empty inputs, autocast on every device, and protection of rounded weights.

    Attributes:
        class_before: the class that the layer had.
        is_computing: the forward of the layer is running.
        added: names of the attributes that the conversion has added.
    """

    class_before: type[nn.Module]
    is_computing: bool
    added: tuple[str, ...]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in features] -> [..., out features]."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if not x.numel():  # no tokens for an expert: there is no scale of nothing
            weight, bias = (self._parameters[name] for name in ("weight", "bias"))
            return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))  # type: ignore[union-attr]
        self.is_computing = True
        try:
            y: Tensor = super().forward(x)
        finally:
            self.is_computing = False
        return y

    @property
    def weight(self) -> Tensor:
        """The weight.

        Raises:
            ConfigError: code outside of the layer reads it while it is rounded to float8.
        """
        is_rounded = None if self.is_computing or self not in _is_rounded else _is_rounded[self]()
        if is_rounded is not None and is_rounded():
            raise ConfigError(
                f"the weight of a {type(self).__name__} of shape {tuple(self._parameters['weight'].shape)} is read "  # type: ignore[union-attr]
                "outside of the layer, but was gathered in float8, so it is rounded",
                where="fp8.all_gather",
                fix='set "all_gather" to false, or add the layer to fp8.exclude',
            )
        return self._parameters["weight"]  # type: ignore[return-value]

    def restore_linear(self) -> None:
        """Make the layer what it was."""
        for name in self.added:
            del self.__dict__[name]
        self.__class__ = self.class_before  # type: ignore[assignment]


_is_rounded: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[], bool]]] = WeakKeyDictionary()
"""Layer -> a method: is its weight rounded to float8 now? Not an attribute of the layer, which copies of a model would
have, too; weak, because the method's object refers to the layer."""

_classes: dict[type[nn.Module], type[nn.Module]] = {}


def watch(layer: nn.Module, is_rounded: Callable[[], bool]) -> None:
    """Refuse reads of a layer's weight by other code while `is_rounded()`."""
    if isinstance(layer, Float8Layer):
        _is_rounded[layer] = WeakMethod(is_rounded)


def float8_layers(model: nn.Module, section: Fp8Config, *, degree: int = 1) -> list[str]:
    """Return the names of the linear layers to convert, of the whole model.

    Args:
        degree: the tensor-parallel degree; sizes must be multiples of 16 on every rank.

    Raises:
        ConfigError: a name in `exclude` matches nothing, or no layer can be converted.
    """
    linear, step = dict(_linear_layers(model)), MULTIPLE * degree
    excluded = _excluded(linear, section.exclude)
    fitting = [name for name, one in linear.items() if one.in_features % step == one.out_features % step == 0]
    chosen = [name for name in fitting if name not in excluded]
    if not chosen:
        raise ConfigError(
            f"fp8.exclude leaves none of the {len(fitting)} linear layers"
            if fitting
            else f"{type(model).__name__} has no linear layer whose sizes are multiples of {step}",
            where="fp8.exclude" if fitting else "fp8.enabled",
            fix="delete fp8"
            + (", or lower the tensor-parallel degree" if degree > 1 and not fitting else ""),
        )
    return chosen


def use_float8(
    model: nn.Module, names: Collection[str], recipe: str, device: torch.device, *, logs: bool = True
) -> None:
    """Convert the layers of `model` that are in `names` to float8 products, in place.

    Args:
        names: of the whole model, of which `model` may be a stage.
        logs: log what was converted.

    Raises:
        ConfigError: torchao is missing.
    """
    settings = _settings(recipe, device)
    for name, module in model.named_modules():
        if name in names:
            _convert(module, settings)
    if logs:
        logger.info("fp8: %d linear layers compute in float8 (%s)", len(names), recipe)
    if logs and settings.emulate:
        logger.warning("fp8: this device has no float8 products: they are emulated, which is slow")


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the plain linear layers, but for the output head, routers and the factors of adapters."""
    _, head = ends_of(transformers_model_in(model))
    skipped = {head, *_beside_experts(model), *_adapters(model)}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in skipped and ROUTERS.isdisjoint(name.split(".")):
            yield name, module


def _beside_experts(model: nn.Module) -> Iterator[nn.Module]:
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


def _convert(layer: nn.Module, settings: Any) -> None:
    """Give `layer` the class and the attributes of torchao's layer."""
    from torchao.float8 import convert_to_float8_training

    (converted,) = convert_to_float8_training(nn.Sequential(layer), config=settings)
    kind = type(converted)
    if kind not in _classes:
        more_of_class = {"__module__": kind.__module__, "class_before": nn.Linear}
        _classes[kind] = type(kind.__name__, (Float8Layer, kind), more_of_class)
    own = vars(layer)
    more = {name: value for name, value in vars(converted).items() if name not in own}
    more |= {"is_computing": False, "added": (*more, "is_computing", "added")}
    own.update(more)
    layer.__class__ = _classes[kind]


def cast_weights(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the weights that only float8 layers with one scale per weight own: name -> the dtype of the casts."""
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
    if not isinstance(module, Float8Layer):
        return None
    settings: Any = module.config
    cast = settings.cast_config_weight
    tensorwise = (cast.scaling_type.value, cast.scaling_granularity.value) == ("dynamic", "tensorwise")
    same = cast == settings.cast_config_weight_for_grad_input and not settings.round_scales_to_power_of_2
    return cast.target_dtype if tensorwise and same else None
