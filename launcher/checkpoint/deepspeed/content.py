"""Opens a DeepSpeed checkpoint as `model/<parameter>`, `optimizer/<state>/<parameter>`, and a meta.

These are launcher's names: see `engine/state.py` for them, and for the content of the meta.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import Metadata

from launcher.checkpoint.deepspeed.cuts import cut_of, joined, plain_info
from launcher.checkpoint.deepspeed.experts import stacked
from launcher.checkpoint.deepspeed.files import Files, find
from launcher.checkpoint.deepspeed.layout import Place, StoredTensor, whole
from launcher.checkpoint.deepspeed.mapped import MappedFiles
from launcher.checkpoint.deepspeed.meta import meta_of
from launcher.checkpoint.deepspeed.opened import OpenedFiles, States
from launcher.checkpoint.deepspeed.pipeline import Layers, stages_and_splits
from launcher.checkpoint.deepspeed.sharded import frozen, sharded
from launcher.checkpoint.deepspeed.universal import universal
from launcher.checkpoint.deepspeed.unsharded import of_experts, unsharded
from launcher.errors import CheckpointError, first_names
from launcher.models.stacked_names import stacked_name

logger = logging.getLogger("launcher")


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint.

    Attributes:
        stored: name -> logical tensor.
        meta: in the form of launcher's own meta.json.
        files: files that contain the tensors.
    """

    stored: dict[str, StoredTensor]
    meta: dict[str, Any]
    files: list[Path]

    @cached_property
    def mapping(self) -> MappedFiles:
        """Return the memory mappings of the files."""
        return MappedFiles(self.files)

    @cached_property
    def metadata(self) -> Metadata:
        """Return the names, shapes, dtypes and boxes, in torch.distributed.checkpoint's form."""
        return Metadata({name: stored.entry for name, stored in self.stored.items()})


def open_content(directory: Path) -> Content:
    """Open a DeepSpeed checkpoint (one tag). Its tensors stay on disk.

    Raises:
        CheckpointError: a file is missing, damaged, or of another run, or the kind is not supported.
    """
    files = find(directory).all
    return _opened(directory, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@lru_cache(maxsize=1)
def _opened(directory: Path, files: object) -> Content:
    """Open a checkpoint. Cached, because a load requests the meta, the shapes and the tensors separately.

    `files` makes the cache miss if a file has changed.
    """
    found = find(directory)
    ranks = [OpenedFiles(rank) for rank in found.ranks]
    layers = Layers(found.layers)
    stored, (rest, states, groups) = _of_ranks(directory, ranks, layers)
    if found.universal is not None:
        # The files of several model-parallel ranks have the shapes of the shards.
        own = ranks[0].groups if len(ranks) == 1 else []
        shapes = {name: shape for group in own for name, shape in group.items()}
        merged, rest, states, groups = universal(found.universal, shapes)
        layers.rename_ties(merged, 0)
        stored |= merged
    _check_whole(directory, stored)
    _check_steps(directory, stored)
    _check_optimizer_is_there(found, ranks[0], stored)
    names = [] if found.layers else _group_names(ranks, groups)
    meta = meta_of(ranks[0].model, rest, groups, states, ranks[0].tied, names)
    return Content(stacked(stored, directory), meta, found.all)


def _of_ranks(
    directory: Path, ranks: Sequence[OpenedFiles], layers: Layers
) -> tuple[Place, tuple[dict[str, Any] | None, States, list[dict[str, Any]]]]:
    """Return (tensors of all model-parallel ranks, the first one's (optimizer, states, param groups))."""
    _, splits = stages_and_splits(ranks, layers.files)
    places, first = list[Place](), None
    for number, opened in enumerate(ranks):
        if layers.files:
            opened.module = layers.module_of(opened, number % splits)
        stored, states, groups = _of_rank(opened)
        _check_whole(directory, stored)
        _check_same_weights(opened, stored)
        layers.rename_ties(stored, number % splits)
        places.append(stored)
        first = first or (opened.optimizers.get(0), states, groups)
    assert first is not None
    return _joined(places, splits, ranks[0]), first


def _group_names(ranks: Sequence[OpenedFiles], groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return launcher's names of the parameters of each param group; [] if the files do not record them."""
    named: list[Any] = [group["names"] for group in groups if "names" in group]
    if not named:  # the universal copy of a PipelineModule has files of each stage
        by_group = zip_longest(*(opened.group_names for opened in ranks), fillvalue=[])
        named = [[name for names in group for name in names] for group in by_group]
    if len(named) != len(groups):  # a universal copy of stage 3 has the sub-groups' names
        named = [[name for group in named for name in group]] if len(groups) == 1 else []
    return [list(dict.fromkeys(map(stacked_name, group))) for group in named]


def _of_rank(opened: OpenedFiles) -> tuple[Place, States, list[dict[str, Any]]]:
    """Return (tensors of a model-parallel rank, its states as stored, options of the param groups)."""
    if opened.optimizers:
        stored, (states, groups) = sharded(opened), opened.base_state(0)
    else:
        stored, states, groups = (of_experts if opened.files.whole_optimizer else unsharded)(opened)
    stored |= frozen(opened)
    for name in opened.parameters:
        if f"model/{name}" not in stored and (opened.module[name].numel() or not opened.groups):
            stored[f"model/{name}"] = whole(opened.module[name])
    stored |= {
        f"buffer/{name}": whole(opened.module[name]) for name in opened.buffers if name in opened.module
    }
    return stored, states, groups


def _joined(places: Sequence[Place], splits: int, first: OpenedFiles) -> Place:
    """Join the tensors of all model-parallel ranks into logical tensors.

    Args:
        places: by rank: stage x splits + tensor-parallel rank. The first stage that has a tensor is used.
    """
    by_split: list[Place] = [{} for _ in range(splits)]
    for number in reversed(range(len(places))):
        by_split[number % splits] |= places[number]
    if splits == 1:
        return by_split[0]
    if not first.model.get("universal_checkpoint_info"):
        raise CheckpointError(
            f"{first.files.model[0]} does not record how its {splits} tensor-parallel ranks shard the model.",
            where=str(first.directory),
            fix="load it in a newer DeepSpeed on as many ranks, and save it again (0.19.8 records it)",
        )
    info = plain_info(first.model["universal_checkpoint_info"])
    stored: Place = {}
    for full_name, entry in by_split[0].items():
        kind, name = full_name.rsplit("/", 1)
        if kind in ("buffer", "scalar/step"):
            stored[full_name] = entry
            continue
        parts = [place[full_name] for place in by_split if full_name in place]
        try:
            if len(parts) < splits:
                raise ValueError(f"only {len(parts)} of {splits} tensor-parallel ranks have it")
            stored[full_name] = joined(kind, cut_of(name, info, [part.shape for part in parts]), parts)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{first.directory}: the shards of {full_name} cannot be merged: {error}.",
                where=str(first.directory),
                fix="convert the checkpoint with DeepSpeed's ds_to_universal, and load the result",
            ) from error
    return stored


def _check_whole(directory: Path, stored: Place) -> None:
    lacking = [name for name, entry in stored.items() if not entry.is_whole]
    if lacking:
        raise CheckpointError(
            f"{directory} has only parts of {len(lacking)} tensors: {first_names(lacking)}.",
            where=str(directory),
            fix="a file belongs to another run or is damaged; load another checkpoint (tag)",
        )


def _check_steps(directory: Path, stored: Place) -> None:
    """Check that Adam's moments have a step count: without it the next step would have the wrong size."""
    lacking = [
        name
        for name in (key.removeprefix("optimizer/exp_avg_sq/") for key in stored if "/exp_avg_sq/" in key)
        if f"scalar/step/{name}" not in stored
    ]
    if lacking:
        raise CheckpointError(
            f"{directory} has Adam moments for {len(lacking)} parameters, but no step count.",
            where=str(directory),
            fix="load the checkpoint that it was created from",
        )


def _check_optimizer_is_there(found: Files, first: OpenedFiles, stored: Place) -> None:
    """Check that there are weights, and log a warning if the files of the optimizer state are missing."""
    if any(name.startswith("optimizer/") for name in stored):
        return
    name = first.files.model[0].name.replace("model_states", "optim_states")
    if not any(name.startswith("model/") for name in stored):
        raise CheckpointError(
            f"{found.directory} has no weights: at ZeRO stage 3 they are in files like {name}, but there are none.",
            where=str(found.directory),
            fix="copy all files of the checkpoint, or load another one (tag)",
        )
    # With ZeRO, the model file lists the trained parameters.
    if first.groups and not first.files.all_of_optimizer and found.universal is None:
        logger.warning("%s has no optimizer state files: loading only the weights", found.directory)


def _check_same_weights(opened: OpenedFiles, stored: dict[str, StoredTensor]) -> None:
    """Check that the model file has the same weights as the optimizer files.

    Otherwise the files are of different saves, or of other ranks than their names indicate. At stage 3 the
    model files have no weights, so nothing can be compared.
    """
    for name in opened.parameters:
        tensor, entry = opened.module[name], stored.get(f"model/{name}")
        if entry is not None and tuple(tensor.shape) == entry.shape and not entry.looks_like(tensor):
            raise CheckpointError(
                f"The weights of {name} in {opened.files.model[0]} differ from those in the optimizer state files.",
                where=str(opened.directory),
                fix="files of two saves or of two ranks are mixed up; copy all of them again",
            )


close_content = _opened.cache_clear
