"""Reads from DeepSpeed's files how tensor-parallel ranks shard a parameter, and joins the shards.

`universal_checkpoint_info` specifies it twice: by boxes (`affine_map`, since 0.19), and by patterns of names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from launcher.checkpoint.deepspeed.layout import Part, StoredTensor
from launcher.checkpoint.deepspeed.unpickle import StandIn

Shape = tuple[int, ...]
AFFINE_VERSION = 1
POWERS = {"model": 1, "optimizer/exp_avg": -1, "optimizer/exp_avg_sq": -2}
"""Exponent of the weights' scale per kind of tensor: gradients, and so Adam's moments, scale inversely."""


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor that a rank has.

    Args:
        offsets: offsets in the logical tensor.
        own: offsets in the rank's tensor.
        scale: the rank's weights are the logical weights times this.
    """

    offsets: Shape
    own: Shape
    sizes: Shape
    scale: float = 1.0


@dataclass(frozen=True)
class Cut:
    """The boxes of a logical tensor that each rank has.

    Args:
        shape: of the logical tensor.
        pieces: by rank; a box that several ranks have is listed once.
    """

    shape: Shape
    pieces: list[list[Piece]]


def cut_of(name: str, info: Mapping[str, Any], shapes: Sequence[Shape]) -> Cut:
    """Return how a parameter is sharded.

    Args:
        info: `universal_checkpoint_info`.
        shapes: shapes of the ranks' tensors.

    Raises:
        ValueError: the kind of sharding is not supported.
    """
    affine = info.get("affine_map") or {}
    if affine.get("version", AFFINE_VERSION) > AFFINE_VERSION:
        raise ValueError(f"its affine_map has version {affine['version']}, supported up to {AFFINE_VERSION}")
    for pattern, entry in (affine.get("params") or {}).items():
        if re.match(pattern, name):
            return _affine(entry, len(shapes))
    if _matches(info, "parameter_to_average_patterns", name):
        raise ValueError("it is averaged over the ranks, which is not supported")
    if _matches(info, "tp_replicated_parameter_patterns", name) or len(shapes) == 1:
        return _whole(shapes)
    dim = 1 if _matches(info, "parameter_with_row_parallelism_patterns", name) else 0
    widths = [[shape[dim] for shape in shapes]]
    if _matches(info, "parameter_with_2_sub_params_cat_dim_0", name):
        widths = [[shape[0] // 2 for shape in shapes]] * 2
    for entry in info.get("parameter_with_sub_params") or ():
        if found := next((pattern for pattern in entry["patterns"] if re.match(pattern, name)), None):
            dim = int(entry["partition_dim"])
            widths = _sub_widths(
                entry["shape"][dim], (info.get("sub_param_shard_widths") or {}).get(found), shapes, dim
            )
    cut = _along(dim, widths, shapes)
    if _matches(info, "vocabulary_parameter_patterns", name):
        return _without_padding(cut, int(info["original_vocab_size"]))
    return cut


def joined(kind: str, cut: Cut, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Join the ranks' tensors into the logical tensor.

    Args:
        kind: "model", or "optimizer/" and the name of a state.

    Raises:
        ValueError: the state cannot be scaled back.
    """
    found = StoredTensor(cut.shape, parts[0].dtype)
    for stored, pieces in zip(parts, cut.pieces, strict=True):
        for piece in pieces:
            if piece.scale != 1 and kind not in POWERS:
                raise ValueError(
                    f"the ranks store it scaled by {piece.scale:g}, and {kind} cannot be unscaled"
                )
            scale = piece.scale ** POWERS.get(kind, 1)
            for part in stored.parts:
                if (cutting := _common(part, piece)) is not None:
                    found.parts.append(replace(cutting, scale=scale))
    return found


def _common(part: Part, piece: Piece) -> Part | None:
    """Return the intersection of a part and a piece, as a part of the logical tensor; None if it is empty."""
    starts, sizes, data = [], [], part.data
    for dim, (at, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        low = max(at, piece.own[dim])
        high = min(at + size, piece.own[dim] + piece.sizes[dim])
        if low >= high:
            return None
        data = data.narrow(dim, low - at, high - low)
        starts.append(low - piece.own[dim] + piece.offsets[dim])
        sizes.append(high - low)
    return Part(tuple(starts), tuple(sizes), data)


def _affine(entry: Mapping[str, Any], ranks: int) -> Cut:
    shape = tuple(entry["logical_shape"])
    by_rank: list[list[Piece]] = []
    for rank in range(ranks):
        said = entry["ranks"][rank if rank in entry["ranks"] else str(rank)]
        own = tuple(said["shard_shape"])
        pieces = [
            piece for piece in said["pieces"] if min(piece["locations"]) == rank and math.prod(piece["shape"])
        ]
        by_rank.append(
            [
                Piece(
                    _index(piece["source"], shape),
                    _index(piece["dest"], own),
                    tuple(piece["shape"]),
                    float(piece.get("scale", 1.0)),
                )
                for piece in pieces
            ]
        )
    return Cut(shape, by_rank)


def _index(said: Sequence[Any], shape: Shape) -> Shape:
    """Return the index of a flat offset in a row-major tensor. Raise ValueError if the strides differ."""
    offset, strides = int(said[0]), [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if any(size > 1 and got != want for size, got, want in zip(shape, said[1], strides, strict=True)):
        raise ValueError(
            f"its boxes have strides {list(said[1])}, which do not match the shape {list(shape)}"
        )
    return tuple(offset // stride % size for stride, size in zip(strides, shape, strict=True))


def _whole(shapes: Sequence[Shape]) -> Cut:
    zeros = (0,) * len(shapes[0])
    return Cut(shapes[0], [[Piece(zeros, zeros, shapes[0])], *([] for _ in shapes[1:])])


def _along(dim: int, widths: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> Cut:
    """Return the cut of a concatenation of sub-tensors along `dim`, each of which is sharded along `dim`.

    Args:
        widths: sizes of each sub-tensor's shards along `dim`, by rank.
    """
    pieces: list[list[Piece]] = [[] for _ in shapes]
    at, own = 0, [0] * len(shapes)
    for row in widths:
        for rank, (start, width) in enumerate(zip(accumulate(row, initial=at), row, strict=False)):
            sizes = (*shapes[rank][:dim], width, *shapes[rank][dim + 1 :])
            offsets, inside = [0] * len(sizes), [0] * len(sizes)
            offsets[dim], inside[dim] = start, own[rank]
            if width:
                pieces[rank].append(Piece(tuple(offsets), tuple(inside), sizes))
            own[rank] += width
        at += sum(row)
    if own != [shape[dim] for shape in shapes]:
        raise ValueError(
            f"the ranks have sizes {[shape[dim] for shape in shapes]} along dim {dim}, but {own} are recorded"
        )
    return Cut((*shapes[0][:dim], at, *shapes[0][dim + 1 :]), pieces)


def _sub_widths(sizes: Any, said: Any, shapes: Sequence[Shape], dim: int) -> list[list[int]]:
    """Return the widths of sub-tensors, by rank: those in the file, or equal ones."""
    if said is not None:
        return [list(row) for row in said]
    count = sizes if isinstance(sizes, int) else len(sizes)
    whole = sum(shape[dim] for shape in shapes)
    each = [whole // count] * count if isinstance(sizes, int) else list(sizes)
    return [[size // len(shapes)] * len(shapes) for size in each]


def _without_padding(cut: Cut, rows: int) -> Cut:
    """Return the cut of the first rows: the vocabulary may have been padded for the ranks."""
    pieces = [
        [
            replace(piece, sizes=(min(piece.sizes[0], rows - piece.offsets[0]), *piece.sizes[1:]))
            for piece in own
            if piece.offsets[0] < rows
        ]
        for own in cut.pieces
    ]
    return Cut((min(rows, cut.shape[0]), *cut.shape[1:]), pieces)


def _matches(info: Mapping[str, Any], key: str, name: str) -> bool:
    return any(re.match(pattern, name) for pattern in info.get(key) or ())


def plain_info(value: Any) -> dict[str, Any]:
    """Return `universal_checkpoint_info` as plain values: its sub-parameters may be DeepSpeed objects."""
    info = dict(value or {})
    info["parameter_with_sub_params"] = [
        dict(vars(entry)) if isinstance(entry, StandIn) else entry
        for entry in info.get("parameter_with_sub_params") or ()
    ]
    return info
