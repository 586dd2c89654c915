"""The source of a model's initial weights: safetensors, read by slice, or the seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from launcher.errors import ConfigError
from launcher.models.adapters import (
    LoraSettings,
    TrainedAdapters,
    initializer_with_adapters,
    names_under,
    with_adapters,
)
from launcher.models.build import build_on_meta, switch_off_cache
from launcher.models.companions import adopt_generation
from launcher.models.initialize import initializer, seeded
from launcher.models.load import SafetensorsSource, weights_directory
from launcher.tensor.split import BoxReader
from launcher.zero import ModelValues, ParamSource, StoredValues


@dataclass
class SourcedModel:
    """A model, and the source of its weights for launcher.initialize().

    Args:
        model: on meta, unless the full weights had to be loaded.
        source: passed to launcher.initialize(); None initializes from the seed.
        how: a one-line description.
        adapters: the adapters that are trained; None: the whole model is.
    """

    model: nn.Module
    source: ParamSource | None
    how: str
    adapters: TrainedAdapters | None = None


def model_with_source(
    config: PretrainedConfig,
    name: str,
    *,
    from_scratch: bool,
    seed: int,
    lora: LoraSettings | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> SourcedModel:
    """Build the model of `config`, and locate the weights of `name`.

    Args:
        config: the config of the model.
        name: the value of `--model`.
        from_scratch: initialise from the seed, even if there are weights.
        seed: seed for initialised parameters.
        lora: train adapters with these settings, and freeze the weights.
        dtype: in which quantized layers compute.
        device: which quantizes them.

    Raises:
        CheckpointError: the weights are corrupted, or do not fit the config.
        ConfigError: adapters without weights to adapt, or for layers that the model does not have; a package is
            missing.
    """
    model: Any = build_on_meta(config)
    adopt_generation(model)
    directory = None if from_scratch else weights_directory(name)
    if directory is None:
        if lora is not None:
            raise ConfigError(
                f"{name} has no weights to adapt",
                where=f"--model {name}",
                fix="name a directory with weights",
            )
        return SourcedModel(model, None, f"initialised from seed {seed}")
    stored = SafetensorsSource(directory)
    adapters = None if lora is None else TrainedAdapters(lora, _named(name), stored.fingerprint())
    if lora is not None and lora.load_in_4bit:
        how = f"weights of {directory}, quantized to 4 bits on every rank"
        return _in_full(directory, lora, adapters, seed, how, **_quantized(dtype, device))
    names = stored.match_names(model)
    if names is None:  # transformers renames or fuses the weights of this model type on load
        how = (
            f"weights of {directory}, loaded in full on every rank because transformers converts the "
            "parameter names of this model type"
        )
        return _in_full(directory, lora, adapters, seed, how)
    renamed = names_under(model, names)
    make = initializer(model, seed) if lora is None else initializer_with_adapters(model, seed)
    adapted = model if lora is None else with_adapters(model, lora)
    found = renamed(adapted)

    def read(name: str) -> BoxReader | None:
        return partial(stored.read_box, found[name]) if name in found else None

    source = StoredValues(adapted, make, read)
    return SourcedModel(adapted, source, f"weights of {directory}, each rank reads its slices", adapters)


def _in_full(
    directory: Path,
    lora: LoraSettings | None,
    adapters: TrainedAdapters | None,
    seed: int,
    how: str,
    **more: Any,
) -> SourcedModel:
    """Load the weights with transformers; `more` are arguments of its from_pretrained()."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **more)
    switch_off_cache(model)
    if lora is not None:
        with seeded(torch.device("cpu"), seed, ""):
            model = with_adapters(model, lora)
    return SourcedModel(model.train(), ModelValues(), how, adapters)


def _quantized(dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Return the arguments of from_pretrained() for weights of 4 bits, with the settings of QLoRA's authors."""
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise ConfigError(
            "weights of 4 bits require bitsandbytes, which is not installed",
            where="--load-in-4bit",
            fix="pip install bitsandbytes",
        )
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _named(name: str) -> str:
    """Return the value of `--model` as others find it: an absolute path, or the name on the Hub."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name
