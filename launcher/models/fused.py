"""Presents experts that are stored one by one as the model's fused tensors.

Files on the Hub have a tensor for each expert and projection; transformers' models have one for all experts
of a layer, in which gate and up projection are concatenated. The fused tensor is never materialized: a box of
it is read from the stored tensors of the experts that it overlaps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

ReadBox = Callable[[str, Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True)
class FusedExperts:
    """A tensor [experts, rows, ...] that is stored as tensors [rows of a part, ...].

    Args:
        parts: for each part, the stored names by expert.
        rows: number of rows of each part.
        rest: sizes of the dims after the rows.
    """

    parts: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts[0]), sum(self.rows), *self.rest)

    def read(self, offsets: Sequence[int], sizes: Sequence[int], read: ReadBox) -> Tensor:
        """Return the box of `sizes` at `offsets`, assembled from boxes of stored tensors."""
        experts = []
        for expert in range(offsets[0], offsets[0] + sizes[0]):
            pieces, start = [], 0
            for names, rows in zip(self.parts, self.rows, strict=True):
                low, high = max(offsets[1], start), min(offsets[1] + sizes[1], start + rows)
                if low < high:
                    at, size = (low - start, *offsets[2:]), (high - low, *sizes[2:])
                    pieces.append(read(names[expert], at, size))
                start += rows
            experts.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return torch.stack(experts)


def fused_names(
    names: Iterable[tuple[str, str]], converters: Iterable[WeightConverter]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the fused tensors that can be assembled: name -> the stored names of each part, by expert.

    Args:
        names: (stored name, name that the converters expect) of all stored tensors.
        converters: converters of the model; those that do anything other than fuse experts are ignored.
    """
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    patterns: dict[str, list[str]] = {}
    fusing = [converter for converter in converters if _fuses(converter)]
    for stored, name in sorted(names, key=lambda pair: _natural(pair[0])):
        for converter in fusing:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                found[target][pattern].append(stored)
                patterns[target] = converter.source_patterns
                break
    complete = {}
    for target, parts in found.items():
        columns = tuple(tuple(parts.get(pattern, ())) for pattern in patterns[target])
        if len({len(column) for column in columns}) == 1:
            complete[target] = columns
    return complete


def _fuses(converter: WeightConverter) -> bool:
    """Return whether a converter stacks tensors by expert and may concatenate the stacks by rows."""
    first, *rest = converter.operations
    joins = not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1)
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and joins
        and len(converter.target_patterns) == 1
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts expert 10 after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
