"""Writes checkpoints in DeepSpeed's layout, for its engine, `zero_to_fp32.py` and `ds_to_universal`.

One file is in memory at a time. `layout.py` computes the locations of parameters in it, as for reading.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.layout import FlatRange, Shapes, equal_parts, ranges
from launcher.checkpoint.deepspeed.meta import OWN
from launcher.checkpoint.deepspeed.pickling import fragment, loss_scaler, save
from launcher.checkpoint.deepspeed.universal import REST, STEP, WEIGHTS
from launcher.checkpoint.names import LATEST_FILE, TMP, UNIVERSAL_FILE
from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.source import SourceCheckpoint, there_already
from launcher.errors import CheckpointError

logger = logging.getLogger("launcher")

VERSION = "0.19.8"
"""Version of DeepSpeed whose layout is written."""
UNIVERSAL_VERSION = 0.4
MODEL_FILE = "mp_rank_00_model_states.pt"
ALIGNMENT = 2
"""At stages 1 and 2, the number of elements per rank in the flat tensor of a group is a multiple of this."""
AT_ONCE = 1 << 30
"""Maximum bytes of unsharded tensors in memory."""


def write_ranks(stored: SourceCheckpoint, out: Path, stage: int, ranks: int) -> Path:
    """Write the files of a run at ZeRO `stage` on `ranks` ranks, and `latest`; return the tag's directory.

    Raises:
        CheckpointError: the checkpoint cannot be written in this layout.
    """
    _check_can_resume(stored)
    if not stage and stored.dtype != torch.float32:
        raise CheckpointError(
            f"{stored.path} is from a 16-bit run, whose files at stage 0 depend on the class of its optimizer in "
            "DeepSpeed.",
            where=str(stored.path),
            fix="use --stage 1, or --format universal",
        )
    kind = {torch.bfloat16: "bf16_"}.get(stored.dtype, "")
    with new_directory(out, stored.tag, LATEST_FILE) as directory:
        for rank in range(ranks if stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            save(_model_state(stored, stage, rank, ranks), directory / f"{prefix}{MODEL_FILE}")
        for rank in range(ranks if stage else 0):
            state = _part_of_optimizer(stored, stage, rank, ranks)
            save(
                {"optimizer_state_dict": state, "ds_config": _config(stored, stage), "ds_version": VERSION},
                directory / f"{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    return out / stored.tag


def write_universal(stored: SourceCheckpoint, out: Path) -> Path:
    """Write the universal layout; return the directory of the tag.

    DeepSpeed loads it at stages 1 to 3 on any number of ranks, if its JSON config has
    `"checkpoint": {"load_universal": true}`.
    """
    _check_can_resume(stored)
    _check_names(stored)
    groups = _options(stored)
    counts = {n: {"step": torch.tensor(_step(stored, names))} for n, names in enumerate(stored.groups)}
    rest = {"param_groups": groups, "optimizer_state_dict": {"state": counts, "param_groups": groups}}
    with new_directory(out, stored.tag, UNIVERSAL_FILE, LATEST_FILE) as directory:
        save(_model_state(stored, 2, 0, 1), directory / MODEL_FILE)
        # At stage 3 DeepSpeed expects another name for the file.
        os.link(directory / MODEL_FILE, directory / f"zero_pp_rank_0_{MODEL_FILE}")
        for name, states in stored.whole_states(AT_ONCE):
            folder = directory / "zero" / name
            folder.mkdir(parents=True)
            for state, tensor in states.items():
                save({"param": tensor}, folder / f"{WEIGHTS if state == 'model' else state}.pt")
            if (step := stored.steps.get(name)) is not None:
                save(torch.tensor(step), folder / f"{STEP}.pt")
        save({**_of_optimizer(stored), **rest}, directory / "zero" / REST)
    return out / stored.tag


@contextmanager
def new_directory(out: Path, tag: str, *latest: str) -> Iterator[Path]:
    """Yield a directory that gets its final name when complete; then write `tag` to the `latest` files."""
    directory, unfinished = out / tag, out / f"{TMP}{tag}.{os.getpid()}"
    if directory.exists():
        raise there_already(directory)
    for left in out.glob(f"{TMP}{tag}.*"):  # left by killed exports
        if not (left.suffix[1:].isdigit() and psutil.pid_exists(int(left.suffix[1:]))):
            shutil.rmtree(left, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if directory.exists():
            raise there_already(directory)
        unfinished.rename(directory)
        for name in latest:
            if (out / name).is_file() and (before := (out / name).read_text().strip()) != tag:
                logger.warning("%s now names %s instead of %s", out / name, tag, before)
            (out / name).write_text(tag)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise CheckpointError(
            f"{directory} cannot be written: {reason}.",
            where=str(getattr(error, "filename", None) or directory),
            fix="check the free space and the permissions of the directory, or choose another one",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_can_resume(stored: SourceCheckpoint) -> None:
    """Check that there is an optimizer state, and that no client state key is one of DeepSpeed's own.

    DeepSpeed stores both in one dict.
    """
    if not stored.options:
        raise CheckpointError(
            f"{stored.path} has weights but no optimizer state: DeepSpeed cannot resume from it.",
            where=str(stored.path),
            fix="export only the weights: --format hf, or --format fp32",
        )
    if taken := sorted(set(stored.meta["client_state"]) & OWN):
        raise CheckpointError(
            f"The client state has keys that DeepSpeed reserves: {', '.join(taken)}.",
            where=str(stored.path),
            fix="save the checkpoint with other keys in its client state",
        )


def _check_names(stored: SourceCheckpoint) -> None:
    """Check that the names of parameters are valid directory names."""
    if odd := [name for name in stored.shapes if Path(name).name != name or name in (".", "..")]:
        raise CheckpointError(
            f"The universal layout has a directory for each parameter, and {odd[0]!r} is not a valid directory name.",
            where=str(stored.path),
            fix="export it with --format deepspeed",
        )


# ---- model file ---------------------------------------------------------------------------------


def _model_state(stored: SourceCheckpoint, stage: int, rank: int, ranks: int) -> dict[str, Any]:
    module: dict[str, Tensor] = OrderedDict()
    frozen = {name: stored.shapes[name] for name in stored.frozen}
    fragments: dict[str, Tensor] | None = {} if stage else None
    for name, shape in stored.shapes.items():
        shape, dtype = ((0,), stored.dtype) if stage == 3 else (shape, torch.float32)
        module[name] = torch.empty(shape, dtype=stored.dtype_of(name, dtype))
    if stage != 3:
        stored.load({f"model/{name}": tensor for name, tensor in module.items()})
        module = OrderedDict((n, tensor.to(stored.dtype_of(n, stored.dtype))) for n, tensor in module.items())
    if fragments is not None:
        fragments |= (
            _fragments(stored, module, frozen, rank, ranks) if stage == 3 else {n: module[n] for n in frozen}
        )
    buffers = stored.buffers()
    module |= {**buffers, **{other: module[name] for other, name in stored.tied.items() if name in module}}
    return {
        **stored.meta["client_state"],
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": _whole_optimizer(stored) if not stage else None,
        "param_shapes": [
            OrderedDict((n, torch.Size(stored.shapes[n])) for n in names) for names in stored.groups
        ],
        "frozen_param_shapes": OrderedDict((n, torch.Size(shape)) for n, shape in frozen.items())
        if stage
        else None,
        "frozen_param_fragments": fragments,
        "shared_params": dict(stored.tied),
        "lr_scheduler": stored.schedule,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": stored.meta["skipped_steps"],
        "global_steps": stored.meta["global_steps"],
        "global_samples": stored.meta["global_samples"],
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": _config(stored, stage),
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }


def _config(stored: SourceCheckpoint, stage: int) -> dict[str, Any]:
    """Return the JSON config of the run, with the ZeRO stage of the files."""
    zero = stored.config.get("zero_optimization")
    return {
        **stored.config,
        "zero_optimization": {**(zero if isinstance(zero, dict) else {}), "stage": stage},
    }


def _fragments(
    stored: SourceCheckpoint, module: Mapping[str, Tensor], frozen: Shapes, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Return a rank's equal parts of the frozen parameters; the last ones are padded with zeros."""
    made = {
        n: torch.zeros(-(-math.prod(shape) // ranks), dtype=module[n].dtype) for n, shape in frozen.items()
    }
    parts = [one for n, shape in frozen.items() for one in equal_parts([{n: shape}], [1], ranks)]
    stored.load(_slices("model", (p for p in parts if p.rank == rank), frozen, lambda one: made[one.name]))
    return made


# ---- optimizer files ----------------------------------------------------------------------------


def _of_optimizer(stored: SourceCheckpoint) -> dict[str, Any]:
    """Return the values that DeepSpeed's optimizers save in addition to tensors."""
    scale = stored.meta["loss_scale"]
    return {
        "loss_scaler": loss_scaler(scale, dict(stored.config.get("fp16") or {})),
        "dynamic_loss_scale": scale["dynamic"],
        "overflow": False,
        "clip_grad": stored.clipping,
        "ds_version": VERSION,
    }


def _options(stored: SourceCheckpoint) -> list[dict[str, Any]]:
    """Return the options of the param groups, including those that DeepSpeed's Adam requires."""
    return [{"bias_correction": True, **group} for group in stored.options]


def _step(stored: SourceCheckpoint, names: list[str]) -> float:
    """Return the step count of a group; DeepSpeed has one count per group."""
    return max((stored.steps.get(name, 0.0) for name in names), default=0.0)


@dataclass(frozen=True)
class _Flats:
    """The layout of one rank's flat tensors: the ranges of parameters, and the length of each tensor."""

    found: list[FlatRange]
    lengths: list[int]

    def empty(self) -> list[Tensor]:
        return [torch.zeros(length) for length in self.lengths]


def _flats(stored: SourceCheckpoint, stage: int, rank: int, ranks: int) -> _Flats:
    groups: list[Shapes] = [{name: stored.shapes[name] for name in names} for names in stored.groups]
    if stage == 3:
        lengths = [sum(-(-math.prod(shape) // ranks) for shape in group.values()) for group in groups]
        found = [one for one in equal_parts(groups, lengths, ranks) if one.rank == rank]
        return _Flats(found, lengths)
    by_group = []
    for group in groups:
        count = sum(math.prod(shape) for shape in group.values())
        each = -(-count // (ALIGNMENT * ranks)) * ALIGNMENT
        by_group.append([min(count, (r + 1) * each) - min(count, r * each) for r in range(ranks)])
    found = [one for one in ranges(groups, by_group, None) if one.rank == rank]
    return _Flats(found, [lengths[rank] for lengths in by_group])


def _part_of_optimizer(stored: SourceCheckpoint, stage: int, rank: int, ranks: int) -> dict[str, Any]:
    place = _flats(stored, stage, rank, ranks)
    masters, base = _flat_state(stored, place)
    count = len(place.lengths)
    if stage == 3:
        own = {"fp32_flat_groups": masters, "optimizer_state_dict": base, "partition_count": ranks}
    else:
        own = {
            "single_partition_of_fp32_groups": masters,
            "base_optimizer_state": base,
            "partition_count": [ranks] * count,
            "param_slice_mappings": [_mapping(place, number) for number in range(count)],
            "group_paddings": [_padding(place, ranks, stored, number) for number in range(count)],
        }
    return {**_of_optimizer(stored), "zero_stage": stage, **own}


def _flat_state(stored: SourceCheckpoint, place: _Flats) -> tuple[list[Tensor], dict[str, Any]]:
    """Return (flat master weights, the state of the optimizer that steps them)."""
    flats = {kind: place.empty() for kind in ("model", *stored.states)}
    tensors: dict[str, FlatSlice] = {}
    for kind, made in flats.items():
        tensors |= _slices(kind, place.found, stored.shapes, lambda one, made=made: made[one.group])
    stored.load(tensors)
    states = {
        number: {
            "step": torch.tensor(_step(stored, stored.groups[number])),
            **{kind.removeprefix("optimizer/"): flats[kind][number] for kind in stored.states},
        }
        for number in range(len(place.lengths))
    }
    groups = [{**options, "params": [number]} for number, options in enumerate(_options(stored))]
    return flats["model"], {"state": states, "param_groups": groups}


def _padding(place: _Flats, ranks: int, stored: SourceCheckpoint, number: int) -> int:
    """Return by how many elements a rank's range is shorter than the equal ranges that DeepSpeed uses."""
    count = sum(math.prod(stored.shapes[name]) for name in stored.groups[number])
    return -(-count // (ALIGNMENT * ranks)) * ALIGNMENT - place.lengths[number]


def _mapping(place: _Flats, number: int) -> dict[str, Any]:
    return OrderedDict((p.name, fragment(p.at, p.stop - p.start)) for p in place.found if p.group == number)


def _whole_optimizer(stored: SourceCheckpoint) -> dict[str, Any] | None:
    """Return the optimizer state as stage 0 saves it: per parameter, numbered across all groups."""
    if not stored.groups:
        return None
    numbers = {name: number for number, name in enumerate(name for names in stored.groups for name in names)}
    states: dict[int, dict[str, Tensor]] = {number: {} for number in numbers.values()}
    tensors: dict[str, Tensor] = {}
    for name, number in numbers.items():
        for kind in stored.states:
            made = torch.zeros(stored.shapes[name])
            states[number][kind.removeprefix("optimizer/")] = tensors[f"{kind}/{name}"] = made
        states[number]["step"] = torch.tensor(stored.steps.get(name, 0.0))
    stored.load(tensors)
    groups = [
        {**options, "params": [numbers[name] for name in names]}
        for options, names in zip(_options(stored), stored.groups, strict=True)
    ]
    return {"state": states, "param_groups": groups}


def _slices(kind: str, found: Any, shapes: Shapes, flat_of: Any) -> dict[str, FlatSlice]:
    """Return the ranges of flat tensors as slices that a checkpoint is loaded into."""

    def made() -> Iterator[tuple[str, FlatSlice]]:
        for one in found:
            own = flat_of(one)[one.at : one.at + one.stop - one.start]
            yield f"{kind}/{one.name}", FlatSlice(own, shapes[one.name], one.start, one.stop)

    return dict(made())
