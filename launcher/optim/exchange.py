"""Assembles whole matrices from slices: each on one rank, which processes it and sends its slices back.

Matrices are assigned so that every rank has about the same work. In each direction one collective carries all
of them: each rank sends every other rank its slices of that rank's matrices, (N - 1) / N of its slices in
total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from launcher.comm import all_to_all
from launcher.optim.whole import held
from launcher.zero.flat import ParamSlot


def deal(slots: Sequence[ParamSlot], degree: int) -> list[int]:
    """Assign each matrix to a rank: in order of decreasing work, to the rank with the least work so far (LPT
    scheduling).

    Ties go to the rank that holds most of the matrix already. The work is that of a Gram matrix: elements x
    shorter side. Returns the rank of each matrix.
    """
    work = [slot.numel * min(slot.shape[-2:]) for slot in slots]
    load, owners = [0] * degree, [0] * len(slots)
    for i in sorted(range(len(slots)), key=lambda i: -work[i]):
        owners[i] = min(range(degree), key=lambda rank: (load[rank], -_length(held(slots[i], rank))))
        load[owners[i]] += work[i]
    return owners


def on_whole(
    slots: Sequence[ParamSlot],
    slices: Sequence[Tensor | None],
    work: Callable[[int, Tensor], Tensor],
    tag: str,
) -> list[Tensor | None]:
    """Apply `work` to whole matrices of which this rank has slices. A collective.

    Args:
        slots: the matrices; the same on all ranks of one axis.
        slices: this rank's slice of each [elements]; None if it has no slice.
        work: (index, matrix of the slot's shape) -> the same shape; called on one rank for each matrix.
        tag: prefix of the collectives' tags: `tag`/assemble and `tag`/return.

    Returns:
        This rank's slices of the results.
    """
    if not slots:
        return []
    owners = deal(slots, slots[0].flat.axis.degree)
    whole = _assemble(slots, slices, owners, tag)
    done = {i: work(i, matrix).reshape(-1) for i, matrix in whole.items()}
    return _bring_back(slots, slices, done, owners, tag)


def _assemble(
    slots: Sequence[ParamSlot], slices: Sequence[Tensor | None], owners: list[int], tag: str
) -> dict[int, Tensor]:
    axis = slots[0].flat.axis
    mine = [i for i, owner in enumerate(owners) if owner == axis.rank]
    # If optimizer state is not sharded, the owner already holds its matrices whole.
    parts = [
        [
            (i, held(slot, rank))
            for i, slot in enumerate(slots)
            if slot.flat.shards_optim and owners[i] == axis.rank
        ]
        for rank in range(axis.degree)
    ]
    like = slots[0].flat.master.new_empty(0, dtype=torch.float32)
    outgoing = [
        _joined([slices[i] for i, o in enumerate(owners) if o == rank and slots[i].flat.shards_optim], like)
        for rank in range(axis.degree)
    ]
    incoming = [like.new_empty(sum(_length(span) for _, span in part)) for part in parts]
    all_to_all(outgoing, incoming, axis, f"{tag}/assemble").wait()
    whole = {i: like.new_empty(slots[i].numel) for i in mine}
    for i in mine:
        own = slices[i]
        if own is not None:
            whole[i][held(slots[i], axis.rank)].copy_(own)
    for rank in axis.peers:
        received = incoming[rank].split([_length(span) for _, span in parts[rank]]) if parts[rank] else ()
        for (i, span), values in zip(parts[rank], received, strict=True):
            whole[i][span].copy_(values)
    return {i: matrix.view(slots[i].shape) for i, matrix in whole.items()}


def _bring_back(
    slots: Sequence[ParamSlot],
    slices: Sequence[Tensor | None],
    done: dict[int, Tensor],
    owners: list[int],
    tag: str,
) -> list[Tensor | None]:
    axis = slots[0].flat.axis
    like = slots[0].flat.master.new_empty(0, dtype=torch.float32)
    outgoing = [
        _joined([values[held(slots[i], rank)] for i, values in done.items()], like)
        for rank in range(axis.degree)
    ]
    theirs = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(axis.degree)]
    lengths = [[_length(held(slots[i], axis.rank)) for i in of_rank] for of_rank in theirs]
    incoming = [like.new_empty(sum(of_rank)) for of_rank in lengths]
    all_to_all(outgoing, incoming, axis, f"{tag}/return").wait()
    back: list[Tensor | None] = [None] * len(slots)
    for rank, of_rank in enumerate(theirs):
        received = incoming[rank].split(lengths[rank]) if of_rank else ()
        for i, values in zip(of_rank, received, strict=True):
            if slices[i] is not None:
                back[i] = done[i][held(slots[i], rank)] if rank == axis.rank else values
    return back


def _joined(parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
    present = [part for part in parts if part is not None and part.numel()]
    return torch.cat(present).to(like.dtype) if present else like


def _length(span: slice) -> int:
    return int(span.stop - span.start)
