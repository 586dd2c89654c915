"""A device that copies as late as it may: what is read before it was waited for is not a number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

Ticket = tuple[int, Tensor, Tensor]


class Late:
    """A lane whose copies happen when they are waited for; until then the target holds garbage.

    Args:
        name, events, numbers: each copy has a number, and says when it starts and when it is waited for.
    """

    def __init__(self, name: str, events: list[str], numbers: Iterator[int]) -> None:
        self.name, self.events, self.numbers = name, events, numbers

    def copy(self, into: Tensor, source: Tensor) -> Ticket:
        ticket = next(self.numbers), into, source
        into.fill_(torch.nan if into.is_floating_point() else 0)
        self.events.append(f"{self.name} {ticket[0]}")
        return ticket

    def wait(self, ticket: Ticket) -> None:
        number, into, source = ticket
        into.copy_(source)
        self.events.append(f"{self.name} {number} done")


def late_lanes(device: torch.device) -> tuple[Late, Late]:
    """For `host_copies.lanes`."""
    return tuple(Late(name, [], iter(range(1 << 30))) for name in ("out", "back"))  # type: ignore[return-value]


class InputsAlive:
    """How many inputs of blocks are in memory while no forward runs.

    Args:
        returns: forwards return to who runs the model; one of a stage is still under way when it has run.

    Attributes:
        most: of all forwards so far.
        forwards: of blocks.
    """

    def __init__(self, model: Module, blocks: list[tuple[str, Module]], *, returns: bool) -> None:
        self.most = self.forwards = 0
        self._seen: list[StorageWeakRef] = []
        model.register_forward_pre_hook(self._count)
        if returns:
            model.register_forward_hook(self._count)
        for _, block in blocks:
            block.register_forward_pre_hook(self._remember)

    def _count(self, *_: object) -> None:
        self._seen = [seen for seen in self._seen if not seen.expired()]
        self.most = max(self.most, len({seen.cdata for seen in self._seen}))

    def _remember(self, block: Module, args: tuple[object, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:
            (mine,) = args
            assert isinstance(mine, Tensor)
            self.forwards += 1
            self._seen.append(StorageWeakRef(mine.untyped_storage()))
