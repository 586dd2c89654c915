"""One parameter's place in a flat buffer, and the part of a parameter that a rank owns."""

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
        name: the name that named_parameters() gives, the first one for tied parameters.
        split: which elements of the logical parameter this rank holds.
        split_axis: along it the ranks hold the others: tp or, for experts, ep.
        leaf: what autograd differentiates.
        owners: every (module, attribute) that shows this parameter; more than one for tied parameters.
        holders: the pipeline stages that hold this parameter, each with its term of the gradient.
        used: a gradient arrived since the last step.

    Attributes:
        shape, numel: of the local parameter, which is the logical one where nothing is split.
        flat, offset, span: the flat buffer that it lies in, its first element there, and its range.
        handle: what stands in the modules while the buffer is sharded.
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
        """Give it its place in a flat buffer."""
        self.flat, self.offset, self.span = flat, offset, slice(offset, offset + self.numel)

    @property
    def logical_numel(self) -> int:
        """Return the elements of the logical parameter."""
        return self.split.shape.numel()

    @property
    def padded_numel(self) -> int:
        """Return the elements that the flat buffer keeps for it: the same number on all tp ranks."""
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
        """Return whether a hook of somebody else's is called with its gradient."""
        ours = 1  # `LastHook`
        return bool(self.leaf._backward_hooks) or len(self.leaf._post_accumulate_grad_hooks or ()) > ours

    @property
    def whole(self) -> Tensor | None:
        """Return the local parameter while it is there."""
        return self.leaf.data if self.flat.is_unsharded else None

    def touched(self, *, changed: bool) -> AbstractContextManager[Any]:
        """Do nothing: units are unsharded by their model."""
        return nullcontext()

    def show(self, parameter: Tensor) -> None:
        """Put `parameter` (the leaf or the handle) into every module that owns this slot."""
        for module, attribute in self.owners:
            module._parameters[attribute] = parameter  # type: ignore[assignment]


@dataclass(frozen=True)
class ParamSlice:
    """The part of one parameter that this rank owns.

    Args:
        name: of the logical parameter.
        split: which elements of it are local.
        start, stop: flat element range of the local parameter.
        part: of the master weights: fp32 (the parameter's own dtype when frozen, or without fp32_master).
    """

    name: str
    split: Split
    start: int
    stop: int
    part: OffloadedSlice

    @property
    def data(self) -> Tensor:
        """Return a writable view [stop - start]; bring in what is offloaded."""
        return self.part.load()

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the local parameter."""
        return self.split.local_shape
