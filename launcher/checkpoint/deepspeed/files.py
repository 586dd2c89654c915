"""The files of one of DeepSpeed's checkpoints: which there are, and which ranks wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHERS = (
    (re.compile(r"layer_\d+_expert_\d+_.*\.pt|expp_rank_.*\.pt"), "layers of experts, in files of their own"),
    (re.compile(r"layer_\d+-model_.*\.pt"), "the layers of a PipelineModule, in a file each"),
)


@dataclass(frozen=True)
class Files:
    """The files of one tag.

    Attributes:
        model: data-parallel rank -> the model's state. Without ZeRO 3, rank 0 has all of it.
        optimizer: data-parallel rank -> its part of the optimizer's state; {} without ZeRO.
    """

    directory: Path
    model: dict[int, Path]
    optimizer: dict[int, Path]

    @property
    def all(self) -> list[Path]:
        """Return all files, in the order of the ranks."""
        return [*self.model.values(), *self.optimizer.values()]


def is_deepspeed(path: Path) -> bool:
    """Return whether a directory is a checkpoint (one tag) of DeepSpeed's."""
    return path.is_dir() and next(path.glob("*_model_states.pt"), None) is not None


def find(directory: Path) -> Files:
    """Return the files of a checkpoint.

    Raises:
        CheckpointError: a file is missing, or the checkpoint is of a kind that is not read.
    """
    names = sorted(path.name for path in directory.iterdir())
    for pattern, what in _OTHERS:
        if any(map(pattern.fullmatch, names)):
            raise _unread(directory, what)
    if (directory / "zero").is_dir():
        raise _unread(directory, "DeepSpeed's universal layout")
    model, optimizer = _by_rank(directory, names, _MODEL), _by_rank(directory, names, _OPTIMIZER)
    for found in (model, optimizer):
        _check_all_there(directory, found)
    if not model:
        raise CheckpointError(f"{directory} has no files of the model's state.", where=str(directory))
    return Files(directory, model, optimizer)


def _by_rank(directory: Path, names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise _unread(directory, "a model that was split over tensor-parallel ranks")
        path, rank = directory / name, int(match[1] or 0)
        if rank in found:
            raise _two(found[rank], path)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is not a file.", where=str(path), fix="restore the file that was there"
            )
        found[rank] = path
    return dict(sorted(found.items()))


def _check_all_there(directory: Path, found: dict[int, Path]) -> None:
    lacking = next((rank for rank in range(max(found, default=-1)) if rank not in found), None)
    if lacking is not None:
        like = found[max(found)]
        name = re.sub(r"pp_rank_\d+", f"pp_rank_{lacking}", like.name)
        raise missing(directory / name, like)


def missing(path: Path, like: Path) -> CheckpointError:
    """Return the error for a file that another one says there must be."""
    return CheckpointError(
        f"{path} is missing: {like.name} was written by a run of more ranks.",
        where=str(path.parent),
        fix="copy the files of all nodes into one directory, or load another checkpoint (tag)",
    )


def _two(one: Path, other: Path) -> CheckpointError:
    return CheckpointError(
        f"{one.name} and {other.name} are of the same rank: {one.parent} has files of two saves.",
        where=str(one.parent),
        fix="remove the files of the older one, or load another checkpoint (tag)",
    )


def _unread(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} is a checkpoint of DeepSpeed's with {what}, which launcher does not read yet.",
        where=str(directory),
        fix="write its weights with DeepSpeed's zero_to_fp32.py --safe_serialization, and start from those",
    )
