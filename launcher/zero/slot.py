"""One parameter's place in a flat buffer, and the part of a parameter that a rank owns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from launcher.zero.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from launcher.zero.flat import FlatBuffer

# reads elements [start, stop) of a parameter, flat: (name, start, stop) -> [stop - start]
Reader = Callable[[str, int, int], Tensor]


@dataclass(eq=False)
class Slot:
    """One parameter of a flat buffer.

    Args:
        name: the name that named_parameters() gives, the first one for tied parameters.
        shape: logical shape.
        leaf: what autograd differentiates.
        owners: every (module, attribute) that shows this parameter; more than one for tied parameters.
        offset: first element in the flat buffer.
        used: a gradient arrived since the last step.
    """

    name: str
    shape: torch.Size
    leaf: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    offset: int = 0
    used: bool = False
    flat: FlatBuffer = field(init=False, repr=False)
    handle: ShardedParameter = field(init=False, repr=False)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    def show(self, parameter: Tensor) -> None:
        """Put `parameter` (the leaf or the handle) into every module that owns this slot."""
        for module, attribute in self.owners:
            module._parameters[attribute] = parameter  # type: ignore[assignment]


@dataclass(frozen=True)
class ParamSlice:
    """The part of one parameter that this rank owns.

    Args:
        name, shape: of the logical parameter.
        start, stop: flat element range of it.
        data: [stop - start], master weights: fp32 (the parameter's own dtype when frozen, or without fp32_master); a
            view, writable.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    data: Tensor
