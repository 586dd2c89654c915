"""Finds gradients that are not finite, and the ranks on which they first were not."""

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

NAMED = 5  # maximum names in a message


@dataclass(frozen=True)
class Overflow:
    """A parameter whose reduced gradient has an element that is not finite.

    Args:
        name: the name of the parameter.
        ranks: the ranks whose own gradient was not finite before the reduction, by dp rank, then tp rank;
            empty if only the sum is not finite, or if local gradients were not inspected.
    """

    name: str
    ranks: tuple[int, ...] = ()


class LocalOverflows:
    """Records which gradients of this rank are not finite before they are reduced, while `on` is set.

    Attributes:
        slots: the parameters found in the current step.
    """

    def __init__(self, slots: list[ParamSlot]) -> None:
        self._all, self.slots = slots, set[ParamSlot]()
        self.on = True

    def look(self, full: Tensor) -> None:
        """Inspect a collected gradient; one pass over it."""
        if self.on:
            self.slots |= {slot for slot in self._all if not full[slot.span].isfinite().all()}

    def clear(self) -> None:
        """Reset at the end of a step."""
        self.slots.clear()


def watch_gradients(model: ZeroModel, on: bool) -> None:
    """Record from now on which local gradients are not finite before the reduction; one pass over each."""
    for gradient in model.gradients:
        if isinstance(gradient.inspector, LocalOverflows):
            gradient.inspector.on = on
        elif on:
            gradient.inspector = LocalOverflows(gradient.flat.slots)


def find_overflows(model: ZeroModel) -> list[Overflow]:
    """Return every parameter whose gradient is not finite, the same list on every rank. The list is in
    backward order, so the first entry is nearest to the origin. One collective along dp and tp; called after
    the reduction and before zero_grad."""
    slots = [slot for gradient in model.gradients for slot in gradient.flat.slots]
    index = {slot: i for i, slot in enumerate(slots)}
    axis, tp = model.axis, model.tp
    count = axis.degree * tp.degree
    # one row for the local gradients of each rank, and one for the reduced ones
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
    """Return the first few names as text, with their ranks if local gradients were inspected."""
    return first_names(
        (f"{item.name} ({_where(item.ranks)})" if watched else item.name for item in found), NAMED
    )


def _where(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "only in the sum over ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
