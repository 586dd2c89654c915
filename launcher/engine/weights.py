"""The source of a model's initial weights: safetensors, read by slice, or the seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from launcher.errors import CheckpointError
from launcher.models.build import EMBEDDED, build_on_meta, switch_off_cache
from launcher.models.companions import adopt_generation
from launcher.models.initialize import initializer
from launcher.models.load import SafetensorsSource
from launcher.zero import ModelValues, ParamSource, StoredValues


@dataclass
class SourcedModel:
    """A model, and the source of its weights for launcher.initialize().

    Args:
        model: on meta, unless the full weights had to be loaded.
        source: passed to launcher.initialize(); None initializes from the seed.
        how: a one-line description.
    """

    model: PreTrainedModel
    source: ParamSource | None
    how: str


def model_with_source(config: PretrainedConfig, name: str, *, from_scratch: bool, seed: int) -> SourcedModel:
    """Build the model of `config`, and locate the weights of `name`.

    Args:
        config: the config of the model.
        name: the value of `--model`.
        from_scratch: initialise from the seed, even if there are weights.
        seed: seed for initialised parameters.

    Raises:
        CheckpointError: the weights are corrupted, or do not fit the config.
    """
    model = build_on_meta(config)
    adopt_generation(model)
    directory = None if from_scratch else weights_directory(name)
    if directory is None:
        return SourcedModel(model, None, f"initialised from seed {seed}")
    stored = SafetensorsSource(directory)
    names = stored.match_names(model)
    if names is None:  # transformers renames or fuses the weights of this model type on load
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        switch_off_cache(model)
        how = (
            f"weights of {directory}, loaded in full on every rank because transformers converts the "
            "parameter names of this model type"
        )
        return SourcedModel(model.train(), ModelValues(), how)
    source = StoredValues(model, initializer(model, seed), lambda name: partial(stored.read_box, names[name]))
    return SourcedModel(model, source, f"weights of {directory}, each rank reads its slices")


def weights_directory(name: str) -> Path | None:
    """Return the directory with the safetensors of `--model`; None for a bare config or an embedded model."""
    path = Path(name).expanduser()
    if name in EMBEDDED or path.is_file():
        return None
    if path.is_dir():
        return path if any(path.glob("*.safetensors")) else None
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(
            f"no such file or directory: {name}",
            where=f"--model {name}",
            fix="pass a local directory written by save_pretrained, a config.json, or a name on the "
            "Hugging Face Hub",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        raise CheckpointError(
            f"could not download the weights of {name!r} from the Hugging Face Hub: {error}",
            where=f"--model {name}",
            fix="pass a local directory written by save_pretrained, or only a config.json to train "
            "from scratch",
        ) from error
