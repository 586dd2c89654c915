"""A bitwise comparison of values that several ranks replicate (`replica_check`).

Data-parallel ranks have the same parameters at the stages that do not shard them; at stage 0, and in the
groups of MiCS, the same optimizer state, too. They differ after a memory or processor error (Llama 3,
arXiv:2407.21783, section 3.3.4: six of 419 interruptions), or if a script has changed weights on some ranks
only. Nothing else would reveal this: every rank continues with a finite loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm import Axis
from launcher.comm.plain import gather_plain
from launcher.errors import LauncherError, first_names
from launcher.zero.flat import FlatBuffer

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
StateOf = Callable[[str], Mapping[str, Any]]
"""Parameter name -> the optimizer states of that parameter that are in memory."""


class _Replica(NamedTuple):
    """A value that the ranks of an axis replicate: a flat buffer or one optimizer state, and its named
    pieces."""

    axis: Axis
    whole: Tensor
    pieces: list[tuple[str, Tensor]]


class Deviation(NamedTuple):
    """Ranks whose values differ from those of the other replicas.

    Attributes:
        ranks: global ranks; those of all replicas if no majority determines which are right.
        names: names of the parameters and states that differ.
        is_known: whether a majority determines the wrong ranks.
    """

    ranks: list[int]
    names: list[str]
    is_known: bool

    def __str__(self) -> str:
        what = first_names(self.names)
        numbers = ",".join(map(str, self.ranks))
        if self.is_known:
            who = f"rank {numbers} differs" if len(self.ranks) == 1 else f"ranks {numbers} differ"
            return f"{who} from all other replicas of {what}"
        return (
            f"ranks {numbers} have different values of {what}, and no majority determines which are correct"
        )


def compare_replicas(flats: Sequence[FlatBuffer], state_of: StateOf) -> None:
    """Compare the replicated values of this rank with those of the other ranks. Collective.

    Raises:
        LauncherError: on every rank of an axis whose replicas differ.
    """
    by_axis: dict[int, list[_Replica]] = {}
    for replica in _replicas(flats, state_of):
        if replica.axis.group is not None:
            by_axis.setdefault(id(replica.axis), []).append(replica)
    found = [deviation for replicas in by_axis.values() if (deviation := _compared(replicas)) is not None]
    if found:
        raise LauncherError(
            "; ".join(map(str, found)),
            where="replica_check",
            fix="if the script changes weights or optimizer state, change them on every rank; "
            "otherwise test the memory and the processors of these ranks, and resume from a "
            "checkpoint before this step on other machines",
        )


def _replicas(flats: Sequence[FlatBuffer], state_of: StateOf) -> Iterator[_Replica]:
    for flat in flats:
        dp, replicate = flat.axes.dp, flat.axes.replicate
        if not flat.sharded and flat.full is not None:
            yield _Replica(dp, flat.full, [(slot.name, flat.full[slot.span]) for slot in flat.slots])
        owners = replicate if flat.shards_optim else dp
        if owners.degree == 1 or flat.is_offloaded or not flat.trainable:
            continue
        if flat.sharded or flat.own_master:
            yield _Replica(owners, flat.master, master_of(flat))
        for name, value in states_of(flat, state_of):
            yield _Replica(owners, value, [(name, value)])


def master_of(flat: FlatBuffer) -> list[tuple[str, Tensor]]:
    """Return the master weights of this rank as (name, values)."""
    return [(f"the master weights of {slot.name}", part) for slot, part in flat.owned_views(flat.master)]


def states_of(flat: FlatBuffer, state_of: StateOf) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer states on this rank as (name, values)."""
    for slot, _, _ in flat.overlaps(flat.owned):
        for key, value in state_of(slot.name).items():
            if isinstance(value, Tensor) and value.dim():
                yield f"{key} of {slot.name}", value


def _compared(replicas: Sequence[_Replica]) -> Deviation | None:
    """Compare the replicas on the ranks of one axis; return the deviation, if any."""
    group = replicas[0].axis.group
    rows = gather_plain(digests([replica.whole for replica in replicas]), group)
    if all(row == rows[0] for row in rows):
        return None
    ranks = dist.get_process_group_ranks(group)
    usual, count = Counter(map(tuple, rows)).most_common(1)[0]
    known = 2 * count > len(rows)
    others = [rank for rank, row in zip(ranks, rows, strict=True) if tuple(row) != usual]
    columns = zip(replicas, zip(*rows, strict=True), strict=True)
    pieces = [piece for replica, values in columns if len(set(values)) > 1 for piece in replica.pieces]
    closer = gather_plain(digests([tensor for _, tensor in pieces]), group)
    named = zip(pieces, zip(*closer, strict=True), strict=True)
    names = [name for (name, _), values in named if len(set(values)) > 1]
    return Deviation(others if known else ranks, names or ["padding"], known)


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each tensor (at least one): the sum of its words, int64 [tensors], on their
    device. A single flipped bit always changes it."""
    return torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in tensors])


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return `checksums` as numbers; the list may be empty. The tensors may be on several devices, and the
    host waits for each device."""
    found: dict[int, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        found |= zip(places, checksums([tensors[place] for place in places]).tolist(), strict=True)
    return [found[place] for place in range(len(tensors))]


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    wide = not (flat.nbytes % 8 or flat.storage_offset() * size % 8)
    return flat.view(torch.int64 if wide else _WHOLE[size])
