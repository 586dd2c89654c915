"""A unit: the part of a model that is gathered, freed and reduced together."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from torch import nn

from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamSlot


class BackwardState(Enum):
    """The progress of the present backward with a unit.

    IDLE: it has not come to it, or there is none.
    BACKWARD: from the first use of its parameters in the backward on, until it is over.
    RECOMPUTED: the same, and its forward has run again inside (activation checkpointing): autograd has saved its
        leaves as they are, so they are kept while they may be needed.
    PASSED: the backward has come to other units, and needs this one no more.
    """

    IDLE = "idle"
    BACKWARD = "backward"
    RECOMPUTED = "recomputed"
    PASSED = "passed"


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
        self.held = False  # GatheredParameters keeps it unsharded
        self.backward_state = BackwardState.IDLE
        self.arrived = 0  # leaves whose gradient has come in this backward
        self.expected = sum(len(gradient.flat.slots) for gradient in gradients)
        self.ran: tuple[int, int] | None = None
        """Numbers of its first and last forward since the last backward."""
        self._partly_frozen = any(flat.sharded and not flat.trainable for flat in flats)

    @property
    def sharded(self) -> bool:
        return self.numel > 0

    @property
    def is_unsharded(self) -> bool:
        """Return whether all its parameters can be used."""
        return all(flat.is_unsharded for flat in self.flats)

    @property
    def is_offloaded(self) -> bool:
        """Return whether its shards are not always in memory."""
        return any(flat.sharded and flat.is_offloaded for flat in self.flats)

    # ---- its backward -----------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Return whether its parameters are in use in the present backward."""
        return self.backward_state in (BackwardState.BACKWARD, BackwardState.RECOMPUTED)

    @property
    def has_all_gradients(self) -> bool:
        """Return whether all leaves have got theirs in this backward, or there are none."""
        return self.arrived == self.expected

    @property
    def may_need_frozen(self) -> bool:
        """Return whether its frozen parameters may be needed after its last gradient: autograd has saved them."""
        return self.backward_state is BackwardState.RECOMPUTED and self._partly_frozen

    def ran_as(self, number: int) -> None:
        """Note a forward."""
        self.ran = (self.ran[0] if self.ran else number, number)

    def to_backward(self) -> None:
        """Begin its backward, if that has not begun."""
        if self.backward_state is not BackwardState.RECOMPUTED:
            self.backward_state = BackwardState.BACKWARD

    def to_recomputed(self) -> None:
        """Note that its forward runs again in the backward."""
        self.backward_state = BackwardState.RECOMPUTED

    def to_passed(self) -> None:
        """Note that the backward has come to units before it."""
        self.backward_state = BackwardState.PASSED

    def to_idle(self) -> None:
        """Forget a backward that is over."""
        self.backward_state, self.arrived, self.ran = BackwardState.IDLE, 0, None

    # ---- its parameters ---------------------------------------------------------------------

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
        """Yield the modules that show its sharded parameters."""
        return (
            owner for flat in self.flats if flat.sharded for slot in flat.slots for owner, _ in slot.owners
        )

    def trainable_slots(self) -> list[ParamSlot]:
        return [slot for gradient in self.gradients for slot in gradient.flat.slots]

    def __repr__(self) -> str:
        return f"Unit({self.name})"
