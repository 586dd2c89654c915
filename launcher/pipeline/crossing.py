"""The tensors that cross between stages, and the interface of a model in stages (`StagedPart`): the border between code
that knows a kind of model and code that runs any."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from launcher.pipeline.plain import travels

Signature = tuple[Any, ...]  # of a batch: structure, shapes and dtypes


@travels
@dataclass(frozen=True)
class TensorShape:
    """The known facts about a tensor."""

    size: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return a tensor's shape; anything else that is not plain data is None."""
        if isinstance(value, Tensor):
            return cls(value.shape, value.dtype)
        return value if isinstance(value, bool | int | float | str) else None


@dataclass
class StageBoundary:
    """The tensors that leave a stage, for batches of one signature. It goes with the first of them to the next stage.

    Attributes:
        shapes: of the tensors.
    """

    shapes: tuple[TensorShape, ...] = field(default=(), kw_only=True)

    @property
    def returning(self) -> tuple[TensorShape, ...]:
        """Return the shapes of the gradients that come back: numbers that are no floats have none."""
        return tuple(shape for shape in self.shapes if shape.dtype.is_floating_point)


def signature_of(batch: Any) -> Signature:
    """Return what the shapes in a forward depend on. Equal signatures, equal shapes."""
    leaves, spec = tree_flatten(batch)
    return repr(spec), *(TensorShape.of(leaf) for leaf in leaves)


class StagedPart(Protocol):
    """A rank's part of a model in stages.

    Attributes:
        virtual_stages: of the whole model.
        rank_of: the pp rank of each.
        blocks: (name, module) of this rank: units of ZeRO.
        shared: names of parameters that several ranks hold -> these ranks, in order.
        elsewhere: parameters that only other ranks hold -> where they are, in words.
        is_whole: the rank has all of the model, and scripts may call it by themselves.
    """

    is_whole: bool
    virtual_stages: int
    rank_of: list[int]
    blocks: list[tuple[str, nn.Module]]
    shared: dict[str, tuple[int, ...]]
    elsewhere: Any

    def learned(self, stage: int, signature: Signature) -> Any:
        """Return the `StageBoundary` that virtual stage `stage` leaves with; None before its first batch of this
        signature."""

    def tell(self, stage: int, signature: Signature, learned: Any) -> None:
        """Note what virtual stage `stage` left with, elsewhere."""

    def forward(
        self, stage: int, received: tuple[Tensor, ...], signature: Signature, call: Callable[[nn.Module], Any]
    ) -> Any:
        """Run a virtual stage.

        Args:
            received: what the virtual stage before it returned; the first one takes nothing.
            signature: of the batch.
            call: calls the module that it is given with the batch.

        Returns:
            The tensors that the next one needs; of the last one what the model returns.
        """

    def names_of(self, stage: int) -> Collection[str] | None:
        """Return the names of the modules that a virtual stage of this rank runs, units of ZeRO among them; None: all
        that there are."""

    def places(self) -> Callable[[str], int]:
        """Return what tells where a parameter or persistent buffer stands in the order of the whole model's
        state_dict()."""

    def before_backward(self, stage: int, signature: Signature) -> None:
        """The backward of a microbatch of this signature comes next: layers may be recomputed."""
