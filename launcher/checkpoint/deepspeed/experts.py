"""Reads the experts of `deepspeed.moe.layer.MoE`.

DeepSpeed writes the weights of each expert to a separate file, and their optimizer states with those of the
data-parallel ranks: expert-parallel rank = rank % degree has a part of the experts, under local indices.

While the files are read, every expert has separate tensors, named by its index in the layer. Then the tensors
of each layer are stacked into one tensor [experts, ...], as in launcher's models (`experts/stacked.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from launcher.checkpoint.deepspeed.layout import Place, Shapes, StoredTensor
from launcher.checkpoint.deepspeed.unpickle import load
from launcher.errors import CheckpointError
from launcher.models.stacked_names import EXPERT, stacked_name


class ExpertFiles:
    """The content of the expert files.

    Args:
        files: (layer, expert) -> file.

    Attributes:
        named: name -> tensor of all experts, in the order of layers, experts, and parameters.
    """

    def __init__(self, files: Mapping[tuple[int, int], Path]) -> None:
        self.named: dict[str, Tensor] = {}
        for _, path in sorted(files.items()):
            self.named |= load(path)
        self._counts = _counts_of(self.named)

    def share(self, rank: int, degree: int) -> list[str]:
        """Return the names of the expert tensors that an expert-parallel rank has."""
        return [name for name in self.named if self._owner(name, degree) == rank]

    def globally(self, shapes: Shapes, rank: int, degree: int) -> dict[str, Any]:
        """Return an expert-parallel rank's {name: shape}, with the experts' indices in their layers."""
        found = {}
        for name, shape in shapes.items():
            if match := EXPERT.fullmatch(name):
                number = int(match[2]) + rank * (self._counts.get(match[1], 0) // degree)
                name = f"{match[1]}deepspeed_experts.{number}.{match[3]}"
            found[name] = shape
        return found

    def _owner(self, name: str, degree: int) -> int:
        match = EXPERT.fullmatch(name)
        return int(match[2]) // max(1, self._counts[match[1]] // degree) if match else 0


def _counts_of(names: Iterable[str]) -> dict[str, int]:
    """Return {layer: number of experts}."""
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        if match := EXPERT.fullmatch(name):
            counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
    return dict(counts)


def stacked(stored: Place, directory: Path) -> Place:
    """Return the logical tensors, with those of the experts of each layer stacked into one.

    Raises:
        CheckpointError: a file of an expert is missing.
    """
    found: Place = {}
    parts: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
    for full_name, entry in stored.items():
        kind, name = full_name.rsplit("/", 1)
        match = EXPERT.fullmatch(name)
        if match is None:
            found[full_name] = entry
        elif kind.startswith("scalar/"):
            found[f"{kind}/{stacked_name(name)}"] = entry
        else:
            parts[f"{kind}/{stacked_name(name)}"][int(match[2])] = entry
    for full_name, of_experts in parts.items():
        if lacking := [number for number in range(max(of_experts)) if number not in of_experts]:
            numbers, name = ", ".join(map(str, lacking)), full_name.rpartition("/")[2]
            raise CheckpointError(
                f"{directory} has no files for experts {numbers} of {name}.",
                where=str(directory),
                fix="copy the files of all nodes into one directory, or load another checkpoint (tag)",
            )
        found[full_name] = _stack([of_experts[number] for number in sorted(of_experts)])
    return found


def _stack(entries: list[StoredTensor]) -> StoredTensor:
    made = StoredTensor((len(entries), *entries[0].shape), entries[0].dtype)
    for number, entry in enumerate(entries):
        made.parts += [
            replace(
                part, offsets=(number, *part.offsets), sizes=(1, *part.sizes), data=part.data.unsqueeze(0)
            )
            for part in entry.parts
        ]
    return made
