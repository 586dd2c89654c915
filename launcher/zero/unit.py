"""A unit: the part of a model that is gathered, freed and reduced together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamSlot


class Unit:
    """A transformer block, an embedding or head, or the rest of the model (the root unit).

    Args:
        name: module path; "root" for the rest.
        module: the module whose forward uses the parameters.
        flats: its flat buffers.
        gradients: of those that are trained.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: list[FlatBuffer], gradients: list[FlatGradient]
    ) -> None:
        self.name, self.module, self.flats, self.gradients = name, module, flats, gradients
        self.numel = sum(flat.numel for flat in flats if flat.sharded)  # what a gather costs
        self.in_backward = (
            False  # from the first use of its parameters in a backward to the end of its gradients
        )
        self.held = False  # GatheredParameters keeps it gathered
        self.recomputed = False  # in this backward: autograd has saved its leaves as they are
        self.partly_frozen = any(flat.sharded and not flat.trainable for flat in flats)
        self.arrived = 0  # leaves whose gradient has come in this backward
        # numbers of its first and last forward since the last backward
        self.ran: tuple[int, int] | None = None
        self.expected = sum(len(gradient.flat.slots) for gradient in self.gradients)

    @property
    def sharded(self) -> bool:
        return self.numel > 0

    @property
    def is_unsharded(self) -> bool:
        """All its parameters can be used."""
        return all(flat.is_unsharded for flat in self.flats)

    @property
    def is_offloaded(self) -> bool:
        """Its shards are not always in memory."""
        return any(flat.sharded and flat.is_offloaded for flat in self.flats)

    def fetch(self) -> None:
        """Start bringing its shards in."""
        for flat in self.flats:
            if flat.sharded:
                flat.fetch()

    def rest(self) -> None:
        """Let go of shards that nobody needed."""
        for flat in self.flats:
            flat.rest()

    def unshard(self, phase: str) -> None:
        for flat in self.flats:
            flat.unshard(phase)

    def wait_for_unshard(self) -> None:
        for flat in self.flats:
            flat.wait_for_unshard()

    def reshard(self) -> None:
        for flat in self.flats:
            flat.reshard()

    def owners(self) -> Iterator[nn.Module]:
        """The modules that show its sharded parameters."""
        return (
            owner for flat in self.flats if flat.sharded for slot in flat.slots for owner, _ in slot.owners
        )

    def trainable_slots(self) -> list[ParamSlot]:
        return [slot for gradient in self.gradients for slot in gradient.flat.slots]

    def __repr__(self) -> str:
        return f"Unit({self.name})"
