"""The search for gradients that are not finite, and for the ranks on which they became so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.comm import all_reduce
from launcher.errors import first_names
from launcher.zero.slot import ParamSlot

if TYPE_CHECKING:
    from launcher.zero.model import ZeroModel

NAMED = 5  # names in a message


@dataclass(frozen=True)
class Overflow:
    """A parameter whose reduced gradient has an element that is not finite.

    Args:
        name: of the parameter.
        ranks: whose own gradient was not finite before it was reduced, by dp rank, then tp rank; empty when only the
            sum is, or when the ranks were not watched.
    """

    name: str
    ranks: tuple[int, ...] = ()


class LocalOverflows:
    """Notes which gradients of this rank are not finite before they are reduced, while it is on.

    Attributes:
        slots: those of the present step.
    """

    def __init__(self, slots: list[ParamSlot]) -> None:
        self._all, self.slots = slots, set[ParamSlot]()
        self.on = True

    def look(self, full: Tensor) -> None:
        """Look at a collected gradient; one pass over it."""
        if self.on:
            self.slots |= {slot for slot in self._all if not full[slot.span].isfinite().all()}

    def clear(self) -> None:
        """The step is over."""
        self.slots.clear()


def watch_gradients(model: ZeroModel, on: bool) -> None:
    """Note from now on which gradients of this rank are not finite before they are reduced; one pass over each."""
    for gradient in model.gradients:
        if isinstance(gradient.inspector, LocalOverflows):
            gradient.inspector.on = on
        elif on:
            gradient.inspector = LocalOverflows(gradient.flat.slots)


def find_overflows(model: ZeroModel) -> list[Overflow]:
    """Return every parameter whose gradient is not finite, the same list on every rank; in the order of the backward,
    so the first is nearest to where it began. One collective along dp and tp; after the reduction and before
    zero_grad."""
    slots = [slot for gradient in model.gradients for slot in gradient.flat.slots]
    index = {slot: i for i, slot in enumerate(slots)}
    axis, tp = model.axis, model.tp
    count = axis.degree * tp.degree
    # one row for each rank's own gradients, and one for the reduced ones
    flags = torch.zeros(count + 1, len(slots), dtype=torch.float64)
    for gradient in model.gradients:
        flat, share = gradient.flat, gradient.share
        for slot, start, stop in flat.overlaps(flat.shard_span):
            at = slot.offset + start - flat.shard_span.start
            flags[-1, index[slot]] = float(not share[at : at + stop - start].isfinite().all())
        gradient.rest(changed=False)
        noted = gradient.inspector.slots if isinstance(gradient.inspector, LocalOverflows) else ()
        for slot in noted:
            flags[axis.rank * tp.degree + tp.rank, index[slot]] = 1
    found = flags.view(-1).to(model.pool.device)
    for along in (axis, tp):
        all_reduce(found, along, "root/overflow").wait()
    flags = found.view(count + 1, -1).cpu()
    order = {name: i for i, (name, _) in enumerate(model.module.named_parameters())}
    bad = [slot for slot in slots if flags[-1, index[slot]]]
    bad.sort(key=lambda slot: -order.get(slot.name, 0))
    return [Overflow(slot.name, tuple(flags[:-1, index[slot]].nonzero().view(-1).tolist())) for slot in bad]


def in_words(found: list[Overflow], *, watched: bool = False) -> str:
    """Return the first few names; with the ranks where they were watched."""
    return first_names(
        (f"{item.name} ({_where(item.ranks)})" if watched else item.name for item in found), NAMED
    )


def _where(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "only in the sum over ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
