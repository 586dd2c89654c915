"""Inputs of a forward whose batch is already sharded: DeepSpeed's scripts slice it before the call.

Slices are equally long and in rank order. Positions and padding masks are gathered from the other ranks. The
model's outputs stay slices, and its loss is the loss of the slice; the script combines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from launcher.comm import Axis
from launcher.errors import ArgumentsError
from launcher.sequence.inputs import (
    EMBEDDINGS,
    IDS,
    LABELS,
    MASK,
    POSITIONS,
    SHIFTED,
    SharedSequence,
    check_shape,
    labels_of_next,
    rules_of_batch,
)
from launcher.sequence.layout import SequenceLayout
from launcher.tensor.functions import gathered

TAG = "root/slices"


def from_slices(
    batch: Mapping[str, Any], layout: SequenceLayout, axis: Axis
) -> tuple[dict[str, Any], SharedSequence]:
    """Return the batch for the model, and the sequence it belongs to. Every rank of cp must call it.

    Args:
        batch: arguments of the model's forward by name.
        layout: contiguous.
        axis: cp.

    Raises:
        ArgumentsError: the shapes or the arguments of the ranks' slices differ.
    """
    source = batch[IDS] if batch.get(IDS) is not None else batch[EMBEDDINGS]
    rows, mine = source.shape[:2]
    check_shape(batch.get(MASK), MASK, rows, mine)
    check_shape(batch.get(POSITIONS), POSITIONS, rows, mine)
    _check_shapes(source, axis, [batch.get(key) is not None for key in (POSITIONS, MASK, LABELS, SHIFTED)])
    length, device = mine * axis.degree, source.device
    own = torch.arange(axis.rank * mine, (axis.rank + 1) * mine, device=device)

    def whole(key: str) -> Tensor | None:
        x = batch.get(key)
        return None if x is None else gathered(x.expand(rows, -1).contiguous(), axis, 1, TAG)

    positions, kept = whole(POSITIONS), whole(MASK)
    rules = rules_of_batch(positions, kept, rows, length)
    found = {
        **batch,
        MASK: torch.ones(rows, length, dtype=torch.bool, device=device) if kept is None else kept,
    }
    if positions is None:
        found[POSITIONS] = own.expand(rows, -1)
    shifted = batch.get(SHIFTED)
    if shifted is None and batch.get(LABELS) is not None:  # the last token's label is in the next slice
        every = labels_of_next({LABELS: whole(LABELS)})
        assert every is not None
        shifted = every.index_select(1, own)
    if batch.get(LABELS) is not None:
        found[LABELS] = found[SHIFTED] = shifted
    places = torch.arange(length, device=device)[None] if positions is None else positions
    return found, SharedSequence(layout, length, length, own, rules, places, shifted, came_in_slices=True)


def _check_shapes(source: Tensor, axis: Axis, given: list[bool]) -> None:
    mine = torch.tensor([[*source.shape[:2], *given]], device=source.device)
    shapes = gathered(mine, axis, 0, TAG).tolist()
    if any(shape != shapes[0] for shape in shapes):
        raise ArgumentsError(
            f"{axis.members} share a sequence, but were called with slices of unequal [batch, tokens] shapes "
            f"{', '.join(str(shape[:2]) for shape in shapes)}, or with different arguments",
            where="forward",
            fix="give each rank a slice of the same shape, as UlyssesSPDataLoaderAdapter does",
        )
