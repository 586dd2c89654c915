"""A checkpoint of LoRA adapters, merged into the model that they adapt: W + alpha / rank * B A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from transformers import PreTrainedModel

from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.source import SourceCheckpoint
from launcher.errors import CheckpointError, first_names
from launcher.models.adapters import ADAPTED, FACTORS, SETTINGS, LoraSettings, names_under, with_adapters
from launcher.models.build import build_on_meta, load_config
from launcher.models.load import SafetensorsSource, weights_directory
from launcher.models.names import ties_of
from launcher.models.packaged import unpacked

WITH_PEFT = "load the adapters with PEFT, and call merge_and_unload()"


def settings_in(stored: SourceCheckpoint) -> LoraSettings | None:
    """Return the settings of the adapters that a recipe trained; None if there are no adapters, or of a script."""
    said = _client_state(stored).get(SETTINGS)
    known = {field.name for field in fields(LoraSettings)}
    return LoraSettings(**said) if isinstance(said, dict) and said.keys() == known else None


def _client_state(stored: SourceCheckpoint) -> dict[str, Any]:
    return dict(stored.meta.get("client_state") or {})


def merged(stored: SourceCheckpoint, model: str, settings: LoraSettings) -> SourceCheckpoint:
    """Return a view of the checkpoint as one of the adapted model, whose weights are computed when they are read.

    Args:
        model: the value of `--model`: the weights that were adapted.
        settings: of the adapters.

    Raises:
        CheckpointError: there are no such weights, or the adapters do not fit them.
    """
    base: Any = build_on_meta(load_config(model))
    values, read_as = _weights(stored, model, base)
    shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    shared = {*ties_of(base).values()}
    before_peft = names_under(base, {name: name for name in read_as})
    adapted = with_adapters(base, settings)
    names = before_peft(adapted)
    _check_factors(stored, model, adapted)
    sums = {names[of]: partial(_sum, stored, name, wrapper) for of, name, wrapper in _wrappers(adapted)}
    if tied := sorted(sums.keys() & shared):
        raise _error(stored, model, f"{first_names(tied)} is tied to another layer", WITH_PEFT)
    buffers = {
        f"buffer/{before}": f"buffer/{name}"
        for name, before in names.items()
        if f"buffer/{name}" in stored.entries
    }

    def read(tensors: Mapping[str, Tensor | FlatSlice]) -> None:
        stored.load({buffers[name]: tensor for name, tensor in tensors.items() if name in buffers})
        for name, tensor in tensors.items():
            if name not in buffers:
                assert isinstance(tensor, Tensor)  # models are exported by whole tensors
                before = name.removeprefix("model/")
                weight = values.read_box(read_as[before], (0,) * tensor.dim(), tuple(tensor.shape)).float()
                tensor.copy_(sums[before](weight) if before in sums else weight)

    entries = {f"model/{name}": _entry(shape) for name, shape in shapes.items()}
    entries |= {name: stored.entries[key] for name, key in buffers.items()}
    return SourceCheckpoint(stored.path, stored.tag, stored.meta, entries, read)


def _weights(
    stored: SourceCheckpoint, model: str, base: PreTrainedModel
) -> tuple[SafetensorsSource, dict[str, str]]:
    """Return the weights that were adapted, and the stored names of the model's tensors."""
    directory = weights_directory(unpacked(model))
    if directory is None:
        raise _error(stored, model, "it has no weights", "name the model that was adapted")
    values = SafetensorsSource(directory)
    if _client_state(stored).get(ADAPTED) not in (None, values.fingerprint()):  # None: saved by a script
        raise _error(stored, model, "they belong to other weights", "name the model that was adapted")
    if (names := values.match_names(base)) is None:
        raise _error(stored, model, "transformers converts its weights when it loads them", WITH_PEFT)
    return values, names


def _check_factors(stored: SourceCheckpoint, model: str, adapted: nn.Module) -> None:
    trained = {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    wrong = [name for name, shape in trained.items() if stored.shapes.get(name) != shape]
    wrong += [name for name in stored.shapes if "lora_" in name and name not in trained]
    if wrong:
        raise _error(
            stored, model, f"they do not fit: {first_names(wrong)}", "name the model that was adapted"
        )


def _wrappers(adapted: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield (name of the parameter that is adapted, name of PEFT's module around its layer, that module)."""
    from peft.tuners.lora import LoraLayer

    names = {id(parameter): name for name, parameter in adapted.named_parameters()}
    for name, wrapper in adapted.named_modules():
        if isinstance(wrapper, LoraLayer):
            yield names[id(wrapper.get_base_layer()._parameters[_key(wrapper)])], name, wrapper


def _key(wrapper: Any) -> str:
    """Return the attribute of the adapted parameter: the weight, or the matrices of all experts."""
    return getattr(wrapper, "parameter_name", "weight")


def _sum(stored: SourceCheckpoint, name: str, wrapper: Any, weight: Tensor) -> Tensor:
    """Return the weight of an adapted layer with its adapters, as PEFT computes it, in fp32.

    Args:
        name, wrapper: PEFT's module around the layer, on meta.
        weight: without adapters, fp32.
    """
    layer = wrapper.get_base_layer()
    values = [(layer, {_key(wrapper): weight})]
    for of, module in wrapper.named_modules():
        if of.split(".")[0] in FACTORS:
            keys = [key for key, parameter in module._parameters.items() if parameter is not None]
            values.append(
                (module, {key: stored.tensor(f"model/{name}.{of}.{key}", torch.float32) for key in keys})
            )
    kept = [(module, dict(module._parameters)) for module, _ in values]
    try:
        for module, tensors in values:
            for key, value in tensors.items():
                module._parameters[key] = nn.Parameter(value, requires_grad=False)
        found: Tensor = weight + wrapper.get_delta_weight("default")
    finally:
        for module, parameters in kept:
            module._parameters.update(parameters)
    return found


def _entry(shape: torch.Size) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), shape, [])


def _error(stored: SourceCheckpoint, model: str, why: str, fix: str) -> CheckpointError:
    return CheckpointError(
        f"the LoRA adapters of {stored.path} cannot be merged into {model}: {why}",
        where=f"--model {model}",
        fix=fix,
    )
