"""The files next to a model's weights: config.json and generation_config.json are written as read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from launcher.models.build import load_config, with_cache_of_source

CONFIG, GENERATION = "config.json", "generation_config.json"
_OF_THE_FILE = {"dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path"}


def adopt_generation(model: PreTrainedModel) -> None:
    """Load the source's generation config (stop tokens, sampling) into a model built from its config."""
    path = source_of(model.config)
    if path is not None and (path / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)


def source_of(config: PretrainedConfig) -> Path | None:
    """Return the local directory that a config was loaded from."""
    if not config.name_or_path:
        return None
    path = Path(config.name_or_path).expanduser()
    if path.exists():
        return path.parent if path.is_file() else path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(config.name_or_path, CONFIG)
    return Path(found).parent if isinstance(found, str) else None


def write_companions(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json of a Hugging Face model.

    If the model still matches its source's files, they are copied; only dtype and class are updated.

    Args:
        dtype: dtype of the weights next to these files.
    """
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = with_cache_of_source(model)
    name, kind = str(dtype).removeprefix("torch."), type(model).__name__
    written = _as_the_source(config, name, kind)
    if written is None:
        config.architectures = [kind]
        config.dtype = name
        config.save_pretrained(directory)
    else:
        (directory / CONFIG).write_text(written, encoding="utf-8")
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        _write_generation(generation, source_of(config), directory)


def _as_the_source(config: PretrainedConfig, dtype: str, kind: str) -> str | None:
    """Return the source's config.json with dtype and class updated; None if the config has changed."""
    source = source_of(config)
    if source is None or not (source / CONFIG).is_file():
        return None
    text = (source / CONFIG).read_text(encoding="utf-8")
    if _meaning(load_config(str(source / CONFIG))) != _meaning(config):
        return None
    document = json.loads(text)
    before = copy.deepcopy(document)
    key = "torch_dtype" if "torch_dtype" in document else "dtype"
    document[key] = dtype
    if kind not in (document.get("architectures") or ()):
        document["architectures"] = [kind]
    return text if document == before else json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _meaning(config: PretrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _OF_THE_FILE}


def _write_generation(generation: GenerationConfig, source: Path | None, directory: Path) -> None:
    file = None if source is None else source / GENERATION
    if file is not None and file.is_file():
        said = GenerationConfig.from_pretrained(file.parent)
        if said.to_diff_dict() == generation.to_diff_dict():
            (directory / GENERATION).write_bytes(file.read_bytes())
            return
    # not save_pretrained(), which rejects inconsistent settings
    generation.to_json_file(directory / GENERATION)
