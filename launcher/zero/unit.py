"""A unit: a part of a model that is gathered, freed and reduced together."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from torch import nn

from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamSlot


class BackwardState(Enum):
    """The progress of a unit in the current backward.

    IDLE: no backward is running, or it has not reached the unit.
    BACKWARD: from the first use of the unit's parameters in the backward until its backward ends.
    RECOMPUTED: like BACKWARD, and the unit's forward has been recomputed (activation checkpointing). Autograd
        has saved its leaves unpacked, so they are kept as long as they may be needed.
    PASSED: the backward has moved on to other units and does not need this one any more.
    """

    IDLE = "idle"
    BACKWARD = "backward"
    RECOMPUTED = "recomputed"
    PASSED = "passed"


class Unit:
    """A transformer block, an embedding or head, or the rest of the model (the root unit).

    Args:
        name: the module path; "root" for the rest.
        module: the module whose forward uses the parameters.
        flats: its flat buffers.
        gradients: the gradients of the trainable flat buffers.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: list[FlatBuffer], gradients: list[FlatGradient]
    ) -> None:
        self.name, self.module, self.flats, self.gradients = name, module, flats, gradients
        self.numel = sum(flat.numel for flat in flats if flat.sharded)  # elements moved by one gather
        self.held = False  # GatheredParameters keeps it unsharded
        self.backward_state = BackwardState.IDLE
        self.arrived = 0  # leaves whose gradient has arrived in this backward
        self.got_gradient: set[int] = set()  # their ids
        self.in_parts = False  # some have arrived in a nested backward
        self.expected = sum(len(gradient.flat.slots) for gradient in gradients)
        self.ran: tuple[int, int] | None = None
        """The numbers of its first and last forward since the last backward."""
        self._partly_frozen = any(flat.sharded and not flat.trainable for flat in flats)

    @property
    def sharded(self) -> bool:
        return self.numel > 0

    @property
    def is_unsharded(self) -> bool:
        """Return whether all its parameters are available."""
        return all(flat.is_unsharded for flat in self.flats)

    @property
    def is_offloaded(self) -> bool:
        """Return whether its shards are not always in memory."""
        return any(flat.sharded and flat.is_offloaded for flat in self.flats)

    # ---- its backward -----------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Return whether its parameters are in use in the current backward."""
        return self.backward_state in (BackwardState.BACKWARD, BackwardState.RECOMPUTED)

    @property
    def has_all_gradients(self) -> bool:
        """Return whether all leaves have got their gradient in this backward; true without leaves."""
        return self.arrived == self.expected

    @property
    def may_need_frozen(self) -> bool:
        """Return whether frozen parameters may be needed after the last gradient: autograd has saved them."""
        return self.backward_state is BackwardState.RECOMPUTED and self._partly_frozen

    def ran_as(self, number: int) -> None:
        """Record the number of a forward."""
        self.ran = (self.ran[0] if self.ran else number, number)

    def to_backward(self) -> None:
        """Enter the backward, unless already in the RECOMPUTED state."""
        if self.backward_state is not BackwardState.RECOMPUTED:
            self.backward_state = BackwardState.BACKWARD

    def to_recomputed(self) -> None:
        """Record that its forward is recomputed in the backward."""
        self.backward_state = BackwardState.RECOMPUTED

    def to_passed(self) -> None:
        """Record that the backward has moved on to earlier units."""
        self.backward_state = BackwardState.PASSED

    def to_idle(self) -> None:
        """Reset after a backward."""
        self.backward_state, self.arrived, self.ran = BackwardState.IDLE, 0, None
        self.got_gradient.clear()
        self.in_parts = False

    # ---- its parameters ---------------------------------------------------------------------

    def fetch(self) -> None:
        """Start loading its shards."""
        for flat in self.flats:
            if flat.sharded:
                flat.fetch()

    def rest(self) -> None:
        """Release shards that were loaded but not used."""
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
        """Yield the modules that own its sharded parameters."""
        return (
            owner for flat in self.flats if flat.sharded for slot in flat.slots for owner, _ in slot.owners
        )

    def trainable_slots(self) -> list[ParamSlot]:
        return [slot for gradient in self.gradients for slot in gradient.flat.slots]

    def __repr__(self) -> str:
        return f"Unit({self.name})"
