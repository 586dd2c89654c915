"""The check that a checkpoint fits the engine's model and optimizer, before loading changes anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Size
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim.lr_scheduler import LRScheduler

from launcher.checkpoint import store
from launcher.checkpoint.names import META_FILE
from launcher.checkpoint.ranks import CollectiveErrors
from launcher.checkpoint.reader import read_metadata, shapes_of
from launcher.engine.whole import of_stages, tied_names
from launcher.errors import CheckpointError, first_names
from launcher.models.settings import differences, settings_of
from launcher.models.state_names import persistent_buffers
from launcher.optim.saved_groups import saved_groups
from launcher.optim.schedules import Schedule

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

Stored = dict[str, TensorStorageMetadata]
STATES = ("optimizer", "scalar", "number")
"""Kinds of entries that store the optimizer states of a parameter."""
META: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("global_steps", "global_samples", "micro_steps", "skipped_steps"), int),
    **dict.fromkeys(("loss_scale", "client_state"), dict),
    **dict.fromkeys(("optimizer", "scheduler"), (dict, type(None))),
}
"""Keys of a checkpoint's metadata that `state.py` reads, and their types."""
KINDS = ("model", "buffer", *STATES, "rng", "rng_python", "rng_numpy", "rng_cuda")


def parts_of(full_name: str) -> tuple[str, str, str]:
    """Split KIND/STATE/PARAMETER; PARAMETER is empty for kinds without states."""
    kind, _, rest = full_name.partition("/")
    key, _, name = rest.partition("/")
    return kind, key, name


def look(
    engine: Engine,
    path: Path,
    meta: dict[str, Any],
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    frozen: bool,
    allow_model_changes: bool,
) -> Stored:
    """Check the checkpoint, and return the tensors that it stores. Collective.

    Args:
        frozen: the checkpoint must have the frozen parameters, too.

    Raises:
        CheckpointError: on every rank: the checkpoint does not fit.
    """
    mine = _shapes(engine)
    read = {f"model/{piece.name}" for piece in engine.zero.slices()} | {
        n for n in mine if n.startswith("buffer/")
    }
    if not frozen:
        read -= _frozen(engine)
    known = set().union(*of_stages(engine, sorted(mine)))
    ties = tied_names(engine)
    known |= {f"model/{name}" for name in ties}  # some programs write every name of a tied parameter
    # and some do not distinguish buffers from parameters
    known |= {f"model/{name}" for name, _ in persistent_buffers(engine.module)}

    def check() -> Stored:
        _check_meta(path, meta)
        if scheduler:
            _check_schedule(engine, path, meta["scheduler"])
        metadata = read_metadata(path)
        entries = metadata.state_dict_metadata.items()
        stored = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        if strict:
            _check_names(path, stored, known)
        own, needed = ({stored_name(n, stored): n for n in names} for names in (mine, read if strict else ()))
        _check_shapes(path, stored, {n: mine[o] for n, o in own.items()}, {*needed}, _frozen(engine))
        _check_kinds(engine, path, stored)
        _check_ties(path, metadata, ties)
        if optimizer:
            _check_optimizer(engine, path, meta)
            _check_groups(engine, path, meta)
            _check_states(engine, path, stored, strict=strict)
        return stored

    ranks = CollectiveErrors(None)
    stored = ranks.together(check)  # each node may have its own directory
    if strict and not allow_model_changes:  # last: errors about names and shapes are more specific
        ranks.together(lambda: _check_settings(engine, path, meta))
    return stored


def stored_name(name: str, stored: Stored) -> str:
    """Return a tensor's name in the checkpoint: FSDP2 programs store buffers under names of parameters."""
    other = name.replace("buffer/", "model/", 1)
    return other if name.startswith("buffer/") and name not in stored and other in stored else name


def _check_ties(path: Path, metadata: Metadata, ties: dict[str, str]) -> None:
    """Check that a tied parameter stored under several names has the same values under each."""
    shapes = shapes_of(metadata)
    for other, name in ties.items():
        if f"model/{other}" in shapes and f"model/{name}" in shapes:
            pair = {f"model/{n}": torch.empty(shapes[f"model/{n}"]) for n in (other, name)}
            store.reading(path, metadata)(pair)
            if not torch.equal(*pair.values()):
                raise CheckpointError(
                    f"The checkpoint has different values for {other} and {name}, but the model ties them.",
                    where=str(path),
                    fix="build the model as it was saved: see tie_word_embeddings in its config.json",
                )


def _check_groups(engine: Engine, path: Path, meta: dict[str, Any]) -> None:
    """Check that the param groups of the checkpoint contain the parameters of this run."""
    if meta["optimizer"] is None or engine.optimizer is None:
        return
    names = engine.optimizer.group_names()
    saved_groups(meta["optimizer"], names)
    known = {name for group in meta["optimizer"].get("names") or () for name in group}
    # launcher's own checkpoints may be loaded into a run that trains more parameters.
    strange = [name for group in names for name in group if name not in known]
    if known and strange and ("writer" in meta or meta.get("imported_from")):
        raise CheckpointError(
            f"The optimizer state of the checkpoint lacks {len(strange)} parameters that are trained "
            f"in this run: {first_names(strange)}.",
            where=str(path),
            fix="train the same parameters with the same ties, or pass load_optimizer_states=False",
        )


def _check_meta(path: Path, meta: dict[str, Any]) -> None:
    """Validate the metadata: a file without checksums, or from another program, may lack required keys."""
    wrong = [
        f"{key} is {'missing' if key not in meta else f'of type {type(meta[key]).__name__}'}"
        for key, kinds in META.items()
        if key not in meta or not isinstance(meta[key], kinds)
    ]
    if wrong:
        raise CheckpointError(
            f"{path / META_FILE} is not valid checkpoint metadata: {'; '.join(wrong)}.",
            where=str(path / META_FILE),
            fix="the checkpoint is damaged; load another tag",
        )


def _shapes(engine: Engine) -> dict[str, Size]:
    """Return name in the checkpoint -> shape, for the parameters and buffers of this stage."""
    shapes = {f"model/{name}": slot.split.shape for name, slot in engine.zero.slots.items()}
    return shapes | {f"buffer/{name}": value.shape for name, value in persistent_buffers(engine.module)}


def _check_settings(engine: Engine, path: Path, meta: dict[str, Any]) -> None:
    was, now = meta.get("model"), settings_of(engine.module)
    if was and now and (found := differences(was, now)):
        raise CheckpointError(
            f"The checkpoint belongs to a model with different settings: {'; '.join(found[:8])}.",
            where=str(path),
            fix="build the model as it was saved. To continue anyway: --allow-model-changes (recipes), "
            "load_checkpoint(allow_model_changes=True)",
        )


def _check_names(path: Path, stored: Stored, known: set[str]) -> None:
    others = [name for name in stored if name.startswith(("model/", "buffer/")) and name not in known]
    if others:
        raise CheckpointError(
            f"The checkpoint has {len(others)} tensors that the model does not have: {first_names(others)}.",
            where=str(path),
            fix="load it into the model that it was saved from. A script can load what matches: "
            "load_checkpoint(load_module_strict=False)",
        )


def _frozen(engine: Engine) -> set[str]:
    return {f"model/{name}" for name, slot in engine.zero.slots.items() if not slot.leaf.requires_grad}


def _check_shapes(
    path: Path, stored: Stored, mine: dict[str, Size], read: set[str], frozen: set[str]
) -> None:
    """Check that the stored tensors have the shapes of the model.

    Args:
        read: names that this rank needs; node-local storage has only the tensors of its own ranks.
    """
    missing = [name for name in mine if name in read and name not in stored]
    wrong = [
        f"{name} is {tuple(shape)} here and {tuple(stored[name].size)} in the checkpoint"
        for name, shape in mine.items()
        if name in stored and stored[name].size != shape
    ]
    found = (("missing", missing), ("with a different shape", wrong))
    if missing and not wrong and frozen.issuperset(missing):
        raise CheckpointError(
            f"The checkpoint lacks {len(missing)} frozen parameters: {first_names(missing)}.",
            where=str(path),
            fix="it was saved without them: load them separately, and pass exclude_frozen_parameters=True",
        )
    if said := [f"{len(names)} {what}: {first_names(names)}" for what, names in found if names]:
        raise CheckpointError(
            f"The checkpoint does not fit the model: {'; '.join(said)}.",
            where=str(path),
            fix="load it into the model that it was saved from; a checkpoint on node-local storage "
            "also needs the same ranks on the same nodes",
        )


def _check_kinds(engine: Engine, path: Path, stored: Stored) -> None:
    """Check that floating-point parameters were stored as such; quantised values cannot be loaded."""
    odd = [
        f"{name} is {stored[f'model/{name}'].properties.dtype}"
        for name, slot in engine.zero.slots.items()
        if f"model/{name}" in stored
        and stored[f"model/{name}"].properties.dtype.is_floating_point != slot.leaf.is_floating_point()
    ]
    if odd:
        raise CheckpointError(
            f"The checkpoint has {len(odd)} parameters with incompatible dtypes: {first_names(odd)}.",
            where=str(path),
            fix="load a checkpoint whose weights are not quantised",
        )


def _check_optimizer(engine: Engine, path: Path, meta: dict[str, Any]) -> None:
    mine, theirs = engine.get_type()[:1], (meta["optimizer"] or {"type": []})["type"]
    if theirs is None:  # a DeepSpeed checkpoint from before the first step
        return
    # DeepSpeed checkpoints do not name the optimizer; the candidates are inferred from the states
    theirs = theirs if isinstance(theirs, list) else [theirs]
    if mine[0] not in theirs:
        has = f"the state of {' or '.join(theirs)}" if theirs else "weights but no optimizer state"
        raise CheckpointError(
            f"The checkpoint has {has}, but this run uses {mine[0]}.",
            where=str(path),
            fix="use the optimizer that it was saved with, or pass load_optimizer_states=False. To "
            "start a recipe from the weights only, use --model after `launch export --format hf`",
        )


def _check_schedule(engine: Engine, path: Path, state: dict[str, Any] | None) -> None:
    """Check the kind of schedule: DeepSpeed's and torch's store their step count under different names, and
    would silently restart."""
    mine = "last_batch_iteration" if isinstance(engine.lr_scheduler, Schedule) else "last_epoch"
    theirs = "last_epoch" if isinstance(engine.lr_scheduler, Schedule) else "last_batch_iteration"
    known = isinstance(engine.lr_scheduler, Schedule | LRScheduler)
    if known and state is not None and theirs in state and mine not in state:
        name = getattr(engine.lr_scheduler, "name", "") or type(engine.lr_scheduler).__name__
        raise CheckpointError(
            f"The scheduler state of the checkpoint does not belong to {name}.",
            where=str(path),
            fix="use the scheduler that it was saved with, or pass load_lr_scheduler_states=False",
        )


def _check_states(engine: Engine, path: Path, stored: Stored, *, strict: bool) -> None:
    """Check that every parameter has the states of similar ones in its group, or none if never stepped."""
    assert engine.optimizer is not None
    strange = [name for name in stored if parts_of(name)[0] not in KINDS]
    states: dict[str, set[str]] = defaultdict(set)
    for full_name, entry in stored.items():
        kind, key, name = parts_of(full_name)
        if kind not in STATES:
            continue
        parameter = stored.get(f"model/{name}")
        if (strict and parameter is None) or (
            kind == "optimizer" and parameter is not None and entry.size != parameter.size
        ):
            strange.append(full_name)
        states[name].add(f"{kind}/{key}")
    if strange:
        raise CheckpointError(
            f"The checkpoint has {len(strange)} optimizer tensors without a parameter: "
            f"{first_names(strange)}.",
            where=str(path),
            fix="it is damaged; load another checkpoint (tag)",
        )
    for names in _alike(engine, stored):
        every = set().union(*(states[name] for name in names))
        lacking = [
            f"{name} lacks {', '.join(sorted(every - states[name]))}"
            for name in names
            if states[name] and states[name] != every
        ]
        if lacking:
            raise CheckpointError(
                f"The checkpoint is incomplete: {first_names(lacking)}.",
                where=str(path),
                fix="it is damaged; load another checkpoint (tag), or pass load_optimizer_states=False",
            )


def _alike(engine: Engine, stored: Stored) -> Iterator[list[str]]:
    """Yield this rank's parameters by param group and number of dims; each such group has the same states."""
    assert engine.optimizer is not None
    groups = enumerate(engine.optimizer.inner.param_groups)
    group_of = {id(tensor): number for number, group in groups for tensor in group["params"]}
    alike: dict[tuple[int | None, int], list[str]] = defaultdict(list)
    for name, tensor in engine.optimizer.tensors.items():
        if f"model/{name}" in stored:
            alike[group_of.get(id(tensor)), len(stored[f"model/{name}"].size)].append(name)
    yield from alike.values()
