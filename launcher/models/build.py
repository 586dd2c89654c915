"""Builds a Hugging Face causal LM from its config on the meta device: shapes and names, no memory."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from launcher.errors import ConfigError
from launcher.hub import unreachable
from launcher.models.packaged import unpacked

EMBEDDED = {"default": "default_config.json", "default-moe": "default_moe_config.json"}
"""Models with configs in this directory: a byte-level Llama of 6.6M parameters, and a mixture of experts."""
_SWITCHED = "_cache_of_source"  # attribute of a model: the original use_cache of its configs


def load_config(model: str) -> PretrainedConfig:
    """Return the config that `--model` names.

    Args:
        model: `default` (the embedded ~6.6M-parameter byte-level Llama), `default-moe` (a Qwen3-MoE with 16
            experts per layer), the path of a bare HF `config.json`, a local directory with one, a name in
            `packaged.py`, or a Hugging Face id.

    Raises:
        ConfigError: nothing is found, the file is not a HF config, or transformers does not know its model
            type.
    """
    if model in EMBEDDED:
        return _config_from_file(Path(__file__).with_name(EMBEDDED[model]))
    path = Path(unpacked(model)).expanduser()
    if path.is_file():
        return _config_from_file(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            adapters = (path / "adapter_config.json").is_file()
            raise ConfigError(
                f"The model directory {model!r} has no config.json"
                + (", only adapters." if adapters else "."),
                where=f"--model {model}",
                fix="pass the model that they adapt, or merge them into it: `launch export RUN OUT --format hf "
                "--model BASE`"
                if adapters
                else "pass a directory written by save_pretrained, or the path of a config.json",
            )
        return _config_from_file(path / "config.json")
    return _config_from_hub(model)


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a causal LM of `config` whose parameters and buffers have shape and dtype but no data.

    Tied weights are tied, the model is in training mode and keeps no key/value cache. `config` is not
    modified.

    Raises:
        ConfigError: transformers has no causal LM of this model type, or the config's values are
            inconsistent.
    """
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        ImportError,
        ArithmeticError,
    ) as error:
        raise ConfigError(
            f"No causal LM can be built from this config ({config.model_type!r}): {_first_line(error)}",
            where=config.name_or_path or "the model's config.json",
            fix="use the config of a causal language model that the installed transformers version supports",
        ) from error
    switch_off_cache(model)
    return model.train()


def switch_off_cache(model: PreTrainedModel) -> None:
    """Switch off the key/value cache for training. `with_cache_of_source` undoes this in exported configs."""
    parts = _parts(model.config)
    setattr(model, _SWITCHED, [part.__dict__.get("use_cache") for part in parts])
    for part in parts:
        part.use_cache = False


def with_cache_of_source(model: PreTrainedModel) -> PretrainedConfig:
    """Return a copy of the model's config with the original `use_cache`, from before it was switched off."""
    config = copy.deepcopy(model.config)
    for part, value in zip(_parts(config), getattr(model, _SWITCHED, ()), strict=False):
        if value is None:
            part.__dict__.pop("use_cache", None)
        else:
            part.use_cache = value
    return config


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the config and, if it has a separate one, the config of its text model."""
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def _config_from_file(path: Path) -> PretrainedConfig:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"), object_hook=_without_tags)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path} is not a readable JSON file: {_first_line(error)}",
            where=str(path),
            fix="pass the path of a Hugging Face config.json",
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(
            f"{path} has no model_type, so it is not a Hugging Face model config.",
            where=str(path),
            fix='add "model_type" (for example "llama"), or pass another file',
        )
    model_type = content.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type, **content)
    except Exception as error:  # transformers validates configs with exceptions of several libraries
        raise ConfigError(
            f"transformers cannot read this config (model_type {model_type!r}): {_first_line(error)}",
            where=str(path),
            fix="correct the value, or install a transformers version that supports this model type",
        ) from error
    config.name_or_path = "" if path.parent == Path(__file__).parent else str(path)
    return config


def _without_tags(found: dict[str, Any]) -> Any:
    """Return the number if a JSON object is transformers' way to write one that JSON does not have."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _config_from_hub(model: str) -> PretrainedConfig:
    if model.endswith(".json") or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"No such file or directory: {model!r}",
            where=f"--model {model}",
            fix="check the path",
        )
    why_not = unreachable()
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, local_files_only=bool(why_not))
    except Exception as error:  # network, authorisation and parsing errors of several libraries
        reason = why_not or _first_line(error)
        raise ConfigError(
            f"Model {model!r} is not a local path, and could not be loaded from the Hugging Face Hub: {reason}",
            where=f"--model {model}",
            fix="check the name and the network, or pass a local directory or config.json; `--model smollm2` does not "
            "need the Hub",
        ) from error
    return config


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and lines[1:] else lines[0]
