"""Maps names of a model's tensors to names in its weight files: base-model prefix, ties, renamings."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from launcher.errors import CheckpointError, first_names
from launcher.models.state_names import persistent

if TYPE_CHECKING:
    from launcher.models.load import SafetensorsSource


_COMPARE = 1 << 22
"""Elements read at a time when two stored copies of a tied weight are compared."""


def match_names(model: PreTrainedModel, source: SafetensorsSource) -> dict[str, str] | None:
    """Map the parameters and persistent buffers of `model` to the stored tensors that have their values.

    Parameters are named as in `model.named_parameters()`: tied ones once. A stored tensor may lack or
    have the base-model prefix (`model.`, `transformer.`), have an older name that transformers renames, or
    be stored under any of the names of a tied weight. Non-persistent buffers have no entry, nor have missing
    tensors that the model's class allows to be missing.

    Returns:
        Name in the model -> stored name. None if transformers computes values on loading (transposes, ...):
        the tensors are then not slices of stored ones, and the caller has to use `from_pretrained`. Experts
        that are stored one by one are read as the fused tensors that they are parts of.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; the error lists them.
    """
    from launcher.models.fused import fused_names

    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    for fused, parts in fused_names(
        [(n, _renamed(n, renamings)) for n in source.names()], converters
    ).items():
        source.fuse(fused, parts)
    stored = source.names()
    if converters and any(_is_converted(name, renamings, converters) for name in stored):
        return None
    aliases = _aliases(model)
    by_alias = {alias: name for name, group in aliases.items() for alias in group}
    found: dict[str, list[str]] = {}
    unexpected: list[str] = []
    for stored_name in stored:
        target = _target(model, stored_name, by_alias, renamings)
        if target is None:
            unexpected.append(stored_name)
        else:
            found.setdefault(target, []).append(stored_name)
    missing = [name for name in aliases if name not in found]
    _complain(model, source, aliases, found, missing, unexpected)
    return {name: _one_of(source, name, found[name]) for name in aliases if name in found}


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return {other name: first name} of tied parameters."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _aliases(model: PreTrainedModel) -> dict[str, set[str]]:
    """Map the canonical name of every parameter and persistent buffer to all its names."""
    canonical: dict[int, str] = {}
    groups: dict[str, set[str]] = {}
    for name, tensor in persistent(model, every_name=True):
        first = canonical.setdefault(id(tensor), name)
        groups.setdefault(first, set()).add(name)
    # Tied parameters may no longer be one object, if the caller has replaced parameters one by one.
    for target, origin in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target in groups and origin in groups and target != origin:
            groups[origin] |= groups.pop(target)
    return groups


def _target(
    model: PreTrainedModel, stored: str, by_alias: dict[str, str], renamings: list[WeightRenaming]
) -> str | None:
    """Return the model's name for a stored tensor, or None."""
    for candidate in dict.fromkeys((stored, _renamed(stored, renamings))):
        for name in _with_and_without_prefix(candidate, model.base_model_prefix):
            if name in by_alias:
                return by_alias[name]
    return None


def _with_and_without_prefix(name: str, prefix: str) -> list[str]:
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _is_converted(name: str, renamings: list[WeightRenaming], converters: list[WeightConverter]) -> bool:
    name = _renamed(name, renamings)
    return any(converter.rename_source_key(name)[1] is not None for converter in converters)


def _complain(
    model: PreTrainedModel,
    source: SafetensorsSource,
    aliases: dict[str, set[str]],
    found: dict[str, list[str]],
    missing: list[str],
    unexpected: list[str],
) -> None:
    """Raise one error with all mismatches, except those that the model's class allows."""
    ignored = list(model._keys_to_ignore_on_load_unexpected or ())
    # Buffers that older versions of transformers stored, and current ones compute.
    ignored += [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"masked_bias$"]
    unexpected = [name for name in unexpected if not any(re.search(p, name) for p in ignored)]
    optional = list(model._keys_to_ignore_on_load_missing or ())
    missing = [name for name in missing if not any(re.search(p, a) for p in optional for a in aliases[name])]
    stored = source.names()
    shapes = {name: tuple(tensor.shape) for name, tensor in persistent(model, every_name=True)}
    wrong = [
        f"{name} is {shapes[name]} in the model and {stored[other].shape} in the file"
        for name, others in found.items()
        for other in others
        if stored[other].shape != shapes[name]
    ]
    problems = [
        f"{len(names)} {what}: {first_names(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("with a different shape", wrong),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"The weights do not match {type(model).__name__}: {'; '.join(problems)}.",
            where=str(source.directory),
            fix="use the config.json that belongs to these weights",
        )


def _one_of(source: SafetensorsSource, name: str, stored: list[str]) -> str:
    """Return the stored name of a parameter; several copies (a tied weight stored twice) must be equal."""
    for other in stored[1:]:
        if not _equal(source, stored[0], other):
            raise CheckpointError(
                f"{name} is tied in the model, but its stored copies {stored[0]} and {other} differ.",
                where=str(source.directory),
                fix="set tie_word_embeddings to false in the model's config.json",
            )
    return stored[0]


def _equal(source: SafetensorsSource, left: str, right: str) -> bool:
    shape = source.names()[left].shape
    row = math.prod(shape[1:])
    rows = max(1, _COMPARE // max(1, row))
    starts = range(0, shape[0], rows) if shape else (0,)
    boxes = [
        ((at, *(0 for _ in shape[1:])), (min(rows, shape[0] - at), *shape[1:])) if shape else ((), ())
        for at in starts
    ]
    return all(torch.equal(source.read_box(left, *box), source.read_box(right, *box)) for box in boxes)
