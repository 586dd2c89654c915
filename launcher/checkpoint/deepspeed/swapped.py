"""Reads optimizer state that a DeepSpeed run offloaded to NVMe.

The checkpoints of such a run have copies of the swap files, which hold the raw fp32 elements of the flat
tensors that are empty in the pickles.

A file is named FIRST_LAST.tensor.swp, or STATE-FIRST_LAST.tensor.swp, by the ids that the first and the last parameter
of a sub-group had in that process. Ids number the model's parameters in order; the first id is not recorded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.files import SWAPPED
from launcher.checkpoint.deepspeed.opened import OpenedFiles
from launcher.errors import CheckpointError

_NAME = re.compile(r"(\d+)_(\d+)\.tensor\.swp")


class SwapFiles:
    """The swap files of a checkpoint at stage 3.

    Args:
        opened: files with sub-groups whose flat tensors may be empty.
    """

    def __init__(self, opened: OpenedFiles) -> None:
        self._opened = opened
        ranks = len(opened.optimizers)
        self._lengths = [sum(-(-math.prod(s) // ranks) for s in group.values()) for group in opened.groups]
        at = {name: number for number, name in enumerate(opened.parameters)}
        self._ids = [
            (at[next(iter(group))], at[[*group][-1]]) if group else (0, 0) for group in opened.groups
        ]

    def filled(self, rank: int, flats: Sequence[Tensor], prefix: str = "") -> list[Tensor]:
        """Return a rank's flat tensors, with the empty ones replaced by the content of their swap files.

        Args:
            prefix: prefix of the files of a state: its name and "-".

        Raises:
            CheckpointError: the files do not match these sub-groups, or are of several runs.
        """
        wanted = [n for n, flat in enumerate(flats) if not flat.numel() and self._lengths[n]]
        if not wanted:
            return list(flats)
        folder = self._opened.directory / SWAPPED / f"rank{rank:02d}"
        first = self._first_id(folder, wanted)
        found = list(flats)
        for number in wanted:
            low, high = self._ids[number]
            path = folder / f"{prefix}{first + low}_{first + high}.tensor.swp"
            if not path.is_file() or path.stat().st_size < 4 * self._lengths[number]:
                raise _unreadable(folder, f"{path.name} is missing or too short")
            found[number] = torch.from_file(
                str(path), shared=False, size=self._lengths[number], dtype=torch.float32
            )
        return found

    def _first_id(self, folder: Path, wanted: Sequence[int]) -> int:
        """Return the id of the model's first parameter, the one that gives every wanted sub-group a file."""
        there = {(int(m[1]), int(m[2])) for path in folder.glob("*.swp") if (m := _NAME.fullmatch(path.name))}
        low, high = self._ids[wanted[0]]
        possible = [
            first - low
            for first, last in sorted(there)
            if last - first == high - low
            and {(first - low + a, first - low + b) for a, b in (self._ids[n] for n in wanted)} <= there
        ]
        if len(possible) != 1:
            why = (
                "it contains files of several runs"
                if possible
                else "it contains no files for these parameters"
            )
            raise _unreadable(folder, why)
        return possible[0]


def _unreadable(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The optimizer state was offloaded to NVMe, and DeepSpeed's swap files in {folder} cannot be read: {why}.",
        where=str(folder),
        fix="copy the whole directory again; if other runs have used its nvme_path, empty it, resume in DeepSpeed, "
        "and save again",
    )
