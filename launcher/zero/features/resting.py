"""Checksums of values that only one rank holds, compared between steps (`replica_check.resting`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from launcher.zero.features.replicas import StateOf, digests, master_of, states_of
from launcher.zero.flat import FlatBuffer

Noted = tuple[int, int, int]
"""The address of a value, its write count, and its checksum."""


class _Value(NamedTuple):
    """A value of this rank. `seen_as`: parameters that are views of it, with separate write counts."""

    name: str
    value: Tensor
    seen_as: tuple[Tensor, ...] = ()

    @property
    def writes(self) -> int:
        return sum(tensor._version for tensor in (self.value, *self.seen_as))


class RestingValues:
    """Checksums of this rank's shard, master weights and optimizer states, kept between steps.

    torch counts the writes to a tensor. Values that the program has written to since are not compared.
    """

    def __init__(self) -> None:
        self._noted: dict[str, Noted] = {}

    def note(self, flats: Sequence[FlatBuffer], state_of: StateOf) -> None:
        """Record the current checksums."""
        self._noted = _now(flats, state_of)

    def forget(self) -> None:
        """Discard the checksums, after all values were loaded; the next comparison then finds nothing."""
        self._noted = {}

    def changed(self, flats: Sequence[FlatBuffer], state_of: StateOf) -> list[str]:
        """Return the names of values whose bits have changed although nothing has written to them."""
        now = _now(flats, state_of)
        noted = ((name, self._noted.get(name), new) for name, new in now.items())
        return [name for name, old, new in noted if old and old[:2] == new[:2] and old[2] != new[2]]


def _now(flats: Sequence[FlatBuffer], state_of: StateOf) -> dict[str, Noted]:
    values = list(_resting(flats, state_of))
    checksums = digests([each.value for each in values])
    return {
        each.name: (each.value.data_ptr(), each.writes, checksum)
        for each, checksum in zip(values, checksums, strict=True)
    }


def _resting(flats: Sequence[FlatBuffer], state_of: StateOf) -> Iterator[_Value]:
    for flat in flats:
        if flat.is_offloaded:
            continue
        shard = flat.shard
        for slot, start, stop in flat.overlaps(flat.shard_span):
            at = slot.offset + start - flat.shard_span.start
            shown = (slot.leaf, slot.handle) if flat.sharded else (slot.leaf,)
            yield _Value(slot.name, shard[at : at + stop - start], shown)
        if flat.trainable:
            named = [*(master_of(flat) if flat.own_master else ()), *states_of(flat, state_of)]
            yield from (_Value(name, value) for name, value in named)
