"""A tiny random model of every causal-LM type of transformers, with a batch that trains it.

Words of this file:

type     what config.json calls `model_type`
kinds    of layers: a model has one layer of each at least, and two in all
part     of a config: that of the text model, of an image tower
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tensor.zoo_tables import (
    CODEBOOKS,
    EXTRAS,
    KINDS,
    KNOWN,
    PART,
    PATCHES,
    SIZES,
    SPECIAL,
    UNRUNNABLE,
    VOCAB,
    WIDTH,
)

CAUSAL_TYPES = [t for t in KNOWN if t in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and t not in UNRUNNABLE]


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A config in which everything is small and no dropout is left.

    Args:
        changes: fields that differ from what the tables say.
    """
    config = _config(CONFIG_MAPPING[model_type], changes)
    return getattr(config, PART[model_type]) if model_type in PART else config


def _config(config_class: type[PretrainedConfig], changes: dict[str, Any]) -> PretrainedConfig:
    """Also of a part, whose class is that of the part of a standard config."""
    standard = config_class()
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in SIZES.items() if name in fields}
    values |= {name: 0.0 for name, default in fields.items() if "drop" in name and isinstance(default, float)}
    if "kv_lora_rank" in fields:  # every query head has its own keys and values
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= _kinds(standard, fields)
    for name in config_class.sub_configs:
        if (part := getattr(standard, name)) is not None:
            values[name] = _config(type(part), {})
    return config_class(**(values | SPECIAL.get(config_class.model_type, {}) | changes))


def _kinds(standard: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The kinds of layers that a standard config has, once each; the last of a shorter list again."""
    lists = {name: getattr(standard, name, None) for name in KINDS if name in fields}
    found = {name: list(dict.fromkeys(kinds)) for name, kinds in lists.items() if kinds}
    depth = max([2, *map(len, found.values())])
    values: dict[str, Any] = {
        name: kinds + kinds[-1:] * (depth - len(kinds)) for name, kinds in found.items()
    }
    return values | ({"num_hidden_layers": depth} if "num_hidden_layers" in fields else {})


def tiny_model(model_type: str, seed: int, **changes: Any) -> PreTrainedModel:
    """In fp32, on the CPU, in training mode.

    No parameter is constant: else it would not be seen which elements of it a rank has.
    """
    config = tiny_config(model_type, **changes)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if model_class.config_class is not type(config):
        config = config.get_text_config()
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.min() == parameter.max():
                parameter += 0.1 * torch.randn_like(parameter)
    return model.train()


def batch_of(model_type: str, seed: int, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """What the model is called with. The first labels of the first row are not counted."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(3, VOCAB, shape, generator=generator)

    books = CODEBOOKS.get(model_type)
    tokens = ids(rows * (books or 1), length)
    labels = tokens.clone() if books is None else tokens.view(rows, books, length).transpose(1, 2).clone()
    labels[0, : length // 4] = -100
    batch = {"input_ids": tokens, "labels": labels}
    for name, types in EXTRAS.items():
        if model_type in types.split():
            shape = (rows, 3, 8, 8) if name == "pixel_values" else (rows, PATCHES, WIDTH)
            batch[name] = (
                ids(rows, length) if name.endswith("_ids") else torch.randn(shape, generator=generator)
            )
    return batch
