"""Exports a checkpoint's weights for from_pretrained: safetensors, config.json and tokenizer."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launcher.checkpoint.export import ExportEntry, write_safetensors
from launcher.checkpoint.merged import merged, settings_in
from launcher.checkpoint.source import SourceCheckpoint, there_already
from launcher.errors import CheckpointError, first_names
from launcher.models.build import build_on_meta, load_config
from launcher.models.companions import CONFIG, adopt_generation, source_of, write_companions
from launcher.models.hub_layout import HubLayout
from launcher.models.names import ties_of
from launcher.models.packaged import unpacked
from launcher.models.settings import differences, settings_of

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "chat_template*")
"""Glob patterns of tokenizer files."""


def write_model(
    stored: SourceCheckpoint, model: str, out: Path, dtype: torch.dtype | None = None
) -> torch.dtype:
    """Write the weights in the Hub's layout, one tensor in memory at a time; return their dtype.

    Args:
        model: source of config.json and tokenizer: a directory, or any other value of the recipes' `--model`.
        dtype: of the written weights; None: the model's dtype in the run (bf16, fp16 or fp32).

    Raises:
        CheckpointError: the weights do not fit the model, or `out` already contains a model.
    """
    if there := [path for path in (out / CONFIG, *sorted(out.glob("[!.]*.safetensors*"))) if path.exists()]:
        raise there_already(there[0])
    if (lora := settings_in(stored)) is not None:
        stored = merged(stored, model, lora)
    dtype = dtype or stored.dtype
    made: Any = build_on_meta(load_config(model))
    adopt_generation(made)
    ties = ties_of(made)
    check_model(stored, made, model)
    layout, entries = HubLayout(made), list[ExportEntry]()
    for name, shape in stored.shapes.items():
        if name in ties:
            continue
        own = stored.dtype_of(name, dtype)
        entries += layout.entries(name, own, torch.Size(shape), partial(stored.tensor, f"model/{name}", own))
    for name, _ in made.named_buffers():
        if (entry := stored.entries.get(f"buffer/{name}")) is not None:
            fetch = partial(stored.tensor, f"buffer/{name}")
            entries.append((name, entry.properties.dtype, tuple(entry.size), fetch))
    write_safetensors(out, entries)
    write_companions(made, out, dtype)
    _copy_tokenizer(source_of(made.config) or Path(unpacked(model)).expanduser(), out)
    return dtype


def check_model(stored: SourceCheckpoint, model: Any, named: str) -> None:
    """Check that a checkpoint belongs to a model.

    Args:
        named: the value of `--model`, for the error message.

    Raises:
        CheckpointError: parameters are missing, unexpected, of another shape, or not tied as in the model.
    """
    ties = ties_of(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    was, now = stored.meta.get("model"), settings_of(model)
    problems = [
        *(differences(was, now) if was and now else ()),
        *(f"{name} is missing" for name in shapes if name not in stored.shapes),
        *(
            f"{name} is not a tensor of the model"
            for name in stored.shapes
            if name not in shapes and name not in ties
        ),
        *(
            f"{other} and {name} differ, but the model ties them"
            for other, name in ties.items()
            if {other, name} <= stored.shapes.keys() and not _equal(stored, other, name)
        ),
        *(
            f"{name} has shape {list(shape)}, expected {list(shapes[name])}"
            for name, shape in stored.shapes.items()
            if shape != shapes.get(name, shape)
        ),
        *(
            f"{key} has shape {list(entry.size)}, expected {list(shapes[name])}"
            for key, entry in stored.entries.items()
            if key.startswith("optimizer/")
            and (name := key.split("/", 2)[2]) in shapes
            and tuple(entry.size) != shapes[name]
        ),
    ]
    if problems:
        adapters = any("lora_" in name for name in stored.shapes)
        raise CheckpointError(
            f"{stored.path} does not match the model {named}: {first_names(problems, between='; ')}.",
            where=str(stored.path),
            fix="merge LoRA adapters in Python; --format fp32 writes the adapter weights alone"
            if adapters
            else "set --model to the model that was trained",
        )


def _equal(stored: SourceCheckpoint, *names: str) -> bool:
    one, other = (stored.tensor(f"model/{name}", torch.float32) for name in names)
    return torch.equal(one, other)


def _copy_tokenizer(source: Path, out: Path) -> None:
    for pattern in TOKENIZER if source.is_dir() else ():
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out / path.name)
