"""Reads the weights and optimizer states of stages 1 to 3, of which every rank has a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.layout import (
    FlatRange,
    Place,
    Shapes,
    StoredTensor,
    equal_parts,
    parts_of,
    ranges,
    whole,
)
from launcher.checkpoint.deepspeed.opened import OpenedFiles, plain_dict, step_of, wrong
from launcher.checkpoint.deepspeed.swapped import SwapFiles


def sharded(opened: OpenedFiles) -> Place:
    """Return master weights, states and step counts, by launcher's names."""
    groups, shapes = opened.groups, dict[str, tuple[int, ...]]()
    key = "fp32_flat_groups" if opened.is_stage_3 else "single_partition_of_fp32_groups"
    masters = [list(opened.optimizers[rank].get(key) or ()) for rank in sorted(opened.optimizers)]
    swap = SwapFiles(opened) if opened.is_stage_3 else None
    if swap is not None:
        masters = [swap.filled(rank, flats) for rank, flats in enumerate(masters)]
        shapes |= {name: tuple(shape) for group in groups for name, shape in group.items()}
        found = list(equal_parts(groups, [flat.numel() for flat in masters[0]], len(masters)))
    else:
        found = []
        for group in range(len(masters[0])):
            for of_group, ranks in opened.sharers(group):
                shapes |= {name: tuple(shape) for name, shape in of_group.items()}
                found += _ranges(opened, group, of_group, ranks, masters)
    stored: Place = {f"model/{name}": StoredTensor(shape, torch.float32) for name, shape in shapes.items()}

    def put(kind: str, flats: list[list[Tensor]]) -> None:
        place(stored, opened.files.optimizer, kind, found, shapes, lambda one: flats[one.rank][one.group])

    put("model", masters)
    states = [list(opened.base_state(rank)[0].values()) for rank in sorted(opened.optimizers)]
    for state in sorted({name for group in states[0] for name in group}):
        if all(is_flat(group.get(state)) for group in states[0]):
            flats = [[group[state] for group in of_rank] for of_rank in states]
            if swap is not None:
                flats = [swap.filled(rank, of_rank, f"{state}-") for rank, of_rank in enumerate(flats)]
            put(f"optimizer/{state}", flats)
    of_groups = step_of(
        opened.base_state(0)[1]
    )  # FusedAdam of older DeepSpeed versions counts steps in its param groups only
    steps = [of_groups if (own := step_of([group])) is None else own for group in states[0]]
    for one in found:
        if one.group < len(steps) and (step := steps[one.group]) is not None:
            stored.setdefault(f"scalar/step/{one.name}", whole(torch.tensor(float(step))))
    return stored


def _ranges(
    opened: OpenedFiles, group: int, shapes: Shapes, ranks: list[int], masters: list[list[Tensor]]
) -> list[FlatRange]:
    """Return the ranges of the parameters in `shapes`, which these ranks shard."""
    paddings = opened.optimizers[0].get("param_alignment_paddings")
    lengths = [masters[rank][group].numel() for rank in ranks]
    found = ranges([shapes], [lengths], None if paddings is None else [paddings[group]])
    return [replace(one, rank=ranks[one.rank], group=group) for one in found]


def frozen(opened: OpenedFiles) -> Place:
    """Return the frozen parameters; at stage 3 each rank has an equal part of each."""
    stored: Place = {}
    shapes = {
        name: tuple(shape) for name, shape in plain_dict(opened.model.get("frozen_param_shapes")).items()
    }
    parts = [plain_dict(opened.models[rank].get("frozen_param_fragments")) for rank in sorted(opened.models)]
    for name, shape in shapes.items():
        if any(name not in fragments for fragments in parts):
            continue  # excluded on purpose, or reported by the check for incomplete tensors
        if tuple(parts[0][name].shape) == shape and len(parts) == 1:
            stored[f"model/{name}"] = whole(parts[0][name])
            continue
        found = equal_parts([{name: shape}], [1], len(parts))
        place(
            stored, opened.files.model, "model", found, {name: shape}, lambda one: parts[one.rank][one.name]
        )
    return stored


def place(
    stored: Place,
    files: Mapping[int, Path],
    kind: str,
    found: Iterable[FlatRange],
    shapes: Mapping[str, tuple[int, ...]],
    flat_of: Callable[[FlatRange], Tensor],
) -> None:
    """Add ranges of flat tensors to the logical tensors in `stored`.

    Args:
        files: rank -> file of its flat tensors, for error messages.

    Raises:
        CheckpointError: a flat tensor is too short.
    """
    for one in found:
        shape = shapes[one.name]
        try:
            flat = flat_of(one).view(-1)
            entry = stored.setdefault(f"{kind}/{one.name}", StoredTensor(shape, flat.dtype))
            entry.parts.extend(parts_of(one, shape, flat))
        except (ValueError, IndexError, KeyError) as error:
            raise wrong(files[one.rank], f"lacks elements of {one.name}: {error}") from None


def is_flat(value: object) -> bool:
    """Return whether a state belongs to a flat tensor."""
    return isinstance(value, Tensor) and value.dim() == 1
