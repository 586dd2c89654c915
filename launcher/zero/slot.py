"""A parameter's position in a flat buffer, and the slice of a parameter that a rank owns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from launcher.comm import Axis
from launcher.offload.offloaded import OffloadedSlice
from launcher.tensor.split import Split
from launcher.zero.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from launcher.zero.flat import FlatBuffer

# reads elements [start, stop) of a local parameter, flat: (name, start, stop) -> [stop - start]
ParamReader = Callable[[str, int, int], Tensor]


NO_OTHERS = Axis("pp")


@dataclass(eq=False)
class ParamSlot:
    """One parameter of a flat buffer.

    Args:
        name: the name in named_parameters(), the first one for tied parameters.
        split: the elements of the logical parameter that this rank holds.
        split_axis: the axis whose other ranks hold the other elements: tp or, for experts, ep.
        leaf: the parameter that autograd differentiates.
        owners: every (module, attribute) that refers to the parameter; more than one for tied parameters.
        holders: the pipeline stages that hold the parameter, each with a term of the gradient.
        used: a gradient has arrived since the last step.

    Attributes:
        shape, numel: those of the local parameter, which equals the logical one if nothing is split.
        flat, offset, span: the flat buffer that contains it, the offset of its first element, and its range.
        handle: the parameter in the modules while the buffer is sharded.
    """

    name: str
    split: Split
    split_axis: Axis
    leaf: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    used: bool = False
    holders: Axis = NO_OTHERS
    flat: FlatBuffer = field(init=False, repr=False)
    offset: int = field(init=False, default=0)
    span: slice = field(init=False, repr=False)
    handle: ShardedParameter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.shape: torch.Size = self.split.local_shape
        self.numel: int = self.shape.numel()

    def place(self, flat: FlatBuffer, offset: int) -> None:
        """Assign a position in a flat buffer."""
        self.flat, self.offset, self.span = flat, offset, slice(offset, offset + self.numel)

    @property
    def logical_numel(self) -> int:
        """Return the number of elements of the logical parameter."""
        return self.split.shape.numel()

    @property
    def padded_numel(self) -> int:
        """Return the number of elements reserved in the flat buffer, the same on all tp ranks."""
        return self.split.padded_numel

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def device(self) -> torch.device:
        return self.flat.pool.device

    @property
    def trainable(self) -> bool:
        return self.leaf.requires_grad

    @property
    def is_watched(self) -> bool:
        """Return whether a hook other than our own is called with its gradient."""
        ours = 1  # `LastHook`
        return bool(self.leaf._backward_hooks) or len(self.leaf._post_accumulate_grad_hooks or ()) > ours

    @property
    def whole(self) -> Tensor | None:
        """Return the local parameter while it is unsharded, else None."""
        return self.leaf.data if self.flat.is_unsharded else None

    def touched(self, *, changed: bool) -> AbstractContextManager[Any]:
        """Do nothing: the model unshards the units."""
        return nullcontext()

    def show(self, parameter: Tensor) -> None:
        """Install `parameter` (the leaf or the handle) in every module that owns this slot."""
        for module, attribute in self.owners:
            module._parameters[attribute] = parameter  # type: ignore[assignment]


@dataclass(frozen=True)
class ParamSlice:
    """The slice of one parameter that this rank owns.

    Args:
        name: the name of the logical parameter.
        split: the elements of the logical parameter that are local.
        start, stop: element range of the flattened local parameter.
        part: the slice of the master weights: fp32 (the parameter's own dtype if frozen, or without
            fp32_master).
    """

    name: str
    split: Split
    start: int
    stop: int
    part: OffloadedSlice

    @property
    def data(self) -> Tensor:
        """Return a writable view [stop - start], loading it if it is offloaded."""
        return self.part.load()

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the local parameter."""
        return self.split.local_shape
