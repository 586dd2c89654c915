"""`Module.apply` on a sharded model: applied to full parameters, with rank 0's changes kept.

This makes `model.apply(init_weights)` work after `launcher.initialize` as it does before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from launcher.zero.model import ZeroModel
    from launcher.zero.unit import Unit


class GatheringApply:
    """Replaces `apply` on every module of a model, as an instance attribute; no class is changed.

    Args:
        zero: the model.
    """

    def __init__(self, zero: ZeroModel) -> None:
        self.zero = zero
        self._units = {owner: unit for unit in zero.units for owner in unit.owners()}
        for module in zero.module.modules():
            if type(module).apply is nn.Module.apply:
                module.__dict__["apply"] = partial(self.apply, module)

    def remove(self) -> None:
        """Restore torch's `apply`."""
        for module in self.zero.module.modules():
            module.__dict__.pop("apply", None)

    def apply(self, module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        """Call `fn` on all submodules, children first, and then on `module`. Collective.

        A unit stays gathered during consecutive modules of it.
        """
        open_unit: Unit | None = None
        with ExitStack() as stack:
            for inner in _children_first(module):
                own = [p for p in inner._parameters.values() if p is not None]
                unit = self._units.get(inner)
                if unit is not None and unit is not open_unit:
                    stack.close()
                    slots = [slot.leaf for flat in unit.flats for slot in flat.slots]
                    stack.enter_context(self.zero.gathered(slots))
                    open_unit = unit
                with self.zero.gathered(own, modifier_rank=0):
                    fn(inner)
        return module


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
