"""Checksums of what one rank alone holds, from one step to the next (`replica_check.resting`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from launcher.zero.features.replicas import StateOf, digests, master_of, states_of
from launcher.zero.flat import FlatBuffer


class RestingValues:
    """Checksums of the shard, the master weights and the states of this rank, from one step to the next.

    torch counts who has written to a tensor. What a program has changed since is not compared.
    """

    def __init__(self) -> None:
        self._noted: dict[str, tuple[int, int, int]] = {}  # name -> (where it lies, writes so far, checksum)

    def note(self, flats: Sequence[FlatBuffer], state_of: StateOf) -> None:
        """Note what they are now."""
        self._noted = self._now(flats, state_of)

    def changed(self, flats: Sequence[FlatBuffer], state_of: StateOf) -> list[str]:
        """Return the names of values that have other bits than were noted."""
        now = self._now(flats, state_of)
        noted = ((name, self._noted.get(name), new) for name, new in now.items())
        return [name for name, old, new in noted if old and old[:2] == new[:2] and old[2] != new[2]]

    def _now(self, flats: Sequence[FlatBuffer], state_of: StateOf) -> dict[str, tuple[int, int, int]]:
        values = list(_resting(flats, state_of))
        checksums = digests([value for _, value in values])
        return {
            name: (value.data_ptr(), value._version, checksum)
            for (name, value), checksum in zip(values, checksums, strict=True)
        }


def _resting(flats: Sequence[FlatBuffer], state_of: StateOf) -> Iterator[tuple[str, Tensor]]:
    for flat in flats:
        if flat.is_offloaded:
            continue
        shard = flat.shard
        for slot, start, stop in flat.overlaps(flat.shard_span):
            at = slot.offset + start - flat.shard_span.start
            yield slot.name, shard[at : at + stop - start]
        if flat.trainable:
            yield from master_of(flat) if flat.own_master else ()
            yield from states_of(flat, state_of)
