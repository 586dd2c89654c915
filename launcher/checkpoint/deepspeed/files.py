"""Finds the files of a DeepSpeed checkpoint, and the ranks that wrote them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from launcher.errors import CheckpointError

SWAPPED = "offloaded_tensors"
K = TypeVar("K")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OF_EXPERTS = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class RankFiles:
    """The files of one model-parallel rank, i.e. of a tensor-parallel rank in a pipeline stage.

    Attributes:
        model: data-parallel rank -> the model's state. Without ZeRO 3, rank 0 has all of it.
        optimizer: data-parallel rank -> its part of the optimizer state; {} without ZeRO.
        whole_optimizer: expert-parallel rank -> the state of its optimizer, if there are experts and no ZeRO.
        experts: (layer, expert) -> its weights.
    """

    model: dict[int, Path] = field(default_factory=dict)
    optimizer: dict[int, Path] = field(default_factory=dict)
    whole_optimizer: dict[int, Path] = field(default_factory=dict)
    experts: dict[tuple[int, int], Path] = field(default_factory=dict)

    @property
    def all_of_optimizer(self) -> list[Path]:
        """Return the files of the optimizer state."""
        return [*self.optimizer.values(), *self.whole_optimizer.values()]

    @property
    def all(self) -> list[Path]:
        """Return all files."""
        parts = (self.model, self.optimizer, self.whole_optimizer, self.experts)
        return [path for part in parts for path in part.values()]


@dataclass(frozen=True)
class Files:
    """The files of one tag.

    Attributes:
        ranks: by model-parallel rank.
        layers: (layer, tensor-parallel rank) -> its weights, of a PipelineModule.
        universal: directory of the universal layout: one directory per parameter, and a file for the rest of
            the optimizer state.
    """

    directory: Path
    ranks: list[RankFiles]
    layers: dict[tuple[int, int], Path]
    universal: Path | None = None

    @property
    def all(self) -> list[Path]:
        """Return all files, in the order of the ranks."""
        own = [path for rank in self.ranks for path in rank.all]
        merged = sorted(self.universal.rglob("*.pt")) if self.universal else []
        return [*own, *self.layers.values(), *merged, *self.swapped]

    @property
    def swapped(self) -> list[Path]:
        """Return the copies of swap files; they have no checksums."""
        return sorted((self.directory / SWAPPED).glob("rank*/*.swp"))


def is_deepspeed(path: Path) -> bool:
    """Return whether a directory is a DeepSpeed checkpoint (one tag)."""
    return path.is_dir() and next(path.glob("*_model_states.pt"), None) is not None


def find(directory: Path) -> Files:
    """Return the files of a checkpoint.

    Raises:
        CheckpointError: a file is missing, or the kind of checkpoint is not supported.
    """
    names = sorted(path.name for path in directory.iterdir())
    ranks: dict[int, RankFiles] = defaultdict(RankFiles)
    layers: dict[tuple[int, int], Path] = {}
    universal = directory / "zero"
    if universal.is_dir():  # may have the model file twice: stage 3 expects another name
        names = [name for name in names if re.sub(r"^zero_pp_rank_\d+_", "", name) not in {*names} - {name}]
    for name in names:
        path = directory / name
        if match := _MODEL.fullmatch(name):
            _put(ranks[int(match[2])].model, int(match[1] or 0), path)
        elif match := _OPTIMIZER.fullmatch(name):
            _put(ranks[int(match[2])].optimizer, int(match[1]), path)
        elif match := _LAYER.fullmatch(name):
            _put(layers, (int(match[1]), int(match[2] or 0)), path)
        elif match := _EXPERT.fullmatch(name):
            _put(ranks[int(match[3])].experts, (int(match[1]), int(match[2])), path)
        elif match := _OF_EXPERTS.fullmatch(name):
            _put(ranks[int(match[2])].whole_optimizer, int(match[1]), path)
    _check_all_there(directory, ranks)
    if len(ranks) > 1 and any(rank.experts for rank in ranks.values()):
        raise unread(directory, "experts and model parallelism")
    return Files(
        directory, [ranks[n] for n in sorted(ranks)], layers, universal if universal.is_dir() else None
    )


def _put(found: dict[K, Path], whose: K, path: Path) -> None:
    if whose in found:
        raise _two(found[whose], path)
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file.", where=str(path), fix="restore the original file")
    found[whose] = path


def _check_all_there(directory: Path, ranks: Mapping[int, RankFiles]) -> None:
    if not any(rank.model for rank in ranks.values()):
        raise CheckpointError(f"{directory} has no model state files.", where=str(directory))
    last = ranks[max(ranks)]
    for number in range(max(ranks)):
        if number not in ranks:
            like = next(iter((last.model or last.optimizer).values()))
            raise missing(directory / re.sub(r"mp_rank_\d+", f"mp_rank_{number:02d}", like.name), like)
    for rank in ranks.values():
        for found in (rank.model, rank.optimizer, rank.whole_optimizer):
            for number in range(max(found, default=-1)):
                if number not in found:
                    like = found[max(found)]
                    raise missing(
                        directory / re.sub(r"pp_rank_\d+", f"pp_rank_{number}", like.name, count=1), like
                    )
    for number, rank in ranks.items():
        if not rank.model:
            like = rank.optimizer[0]
            raise missing(directory / f"mp_rank_{number:02d}_model_states.pt", like)


def missing(path: Path, like: Path) -> CheckpointError:
    """Return the error for a missing file that must exist because `like` does."""
    return CheckpointError(
        f"{path} is missing, although {like.name} exists.",
        where=str(path.parent),
        fix="copy the files of all nodes into one directory, or load another checkpoint (tag)",
    )


def _two(one: Path, other: Path) -> CheckpointError:
    return CheckpointError(
        f"{one.name} and {other.name} belong to the same rank: {one.parent} has files of two saves, or is a "
        "universal checkpoint without its `zero` directory.",
        where=str(one.parent),
        fix="copy the checkpoint again, or load another one (tag)",
    )


def unread(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} is a DeepSpeed checkpoint with {what}, which launcher does not support yet.",
        where=str(directory),
        fix="export its weights with DeepSpeed's zero_to_fp32.py --safe_serialization, and start from them",
    )
