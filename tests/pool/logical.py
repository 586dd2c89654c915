"""The logical parameters of an engine, unsharded one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from launcher.zero import ZeroModel


def logical_parameters(zero: ZeroModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of this pipeline stage.

    All ranks of the stage must iterate to the end: it is a collective.
    """
    for unit in zero.units:
        slots = [slot for flat in unit.flats for slot in flat.slots]
        with zero.gathered([slot.leaf for slot in slots]):
            for slot in slots:
                yield slot.name, zero.logical(slot)
