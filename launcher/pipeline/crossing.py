"""The tensors that cross between stages, and the interface of a staged model (`StagedPart`): it separates
code for one kind of model from code that runs any model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from launcher.pipeline.plain import travels

Signature = tuple[Any, ...]  # a batch's structure, shapes and dtypes


@travels
@dataclass(frozen=True)
class TensorShape:
    """The size and dtype of a tensor."""

    size: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the `TensorShape` of a tensor, plain data as it is, and None for anything else."""
        if isinstance(value, Tensor):
            return cls(value.shape, value.dtype)
        return value if isinstance(value, bool | int | float | str) else None


@dataclass
class StageBoundary:
    """Describes the tensors that leave a stage, for batches of one signature. It is sent to the next stage
    with the first such batch.

    Attributes:
        shapes: shapes of the tensors.
    """

    shapes: tuple[TensorShape, ...] = field(default=(), kw_only=True)

    @property
    def returning(self) -> tuple[TensorShape, ...]:
        """Return the shapes of the gradients that are sent back; only floating-point tensors have one."""
        return tuple(shape for shape in self.shapes if shape.dtype.is_floating_point)


def signature_of(batch: Any) -> Signature:
    """Return the properties of a batch that determine all shapes in its forward."""
    leaves, spec = tree_flatten(batch)
    return repr(spec), *(TensorShape.of(leaf) for leaf in leaves)


class StagedPart(Protocol):
    """A rank's part of a model that is cut into stages.

    Attributes:
        virtual_stages: number of virtual stages of the whole model.
        rank_of: the pp rank of each virtual stage.
        blocks: (name, module) of this rank's blocks, which are ZeRO units.
        shared: names of parameters that several ranks hold -> these ranks, in order.
        elsewhere: parameters that only other ranks hold -> a description of where they are.
        is_whole: whether the rank holds the entire model, so that scripts may call it directly.
    """

    is_whole: bool
    virtual_stages: int
    rank_of: list[int]
    blocks: list[tuple[str, nn.Module]]
    shared: dict[str, tuple[int, ...]]
    elsewhere: Any

    def learned(self, stage: int, signature: Signature) -> Any:
        """Return the `StageBoundary` of the outputs of virtual stage `stage`; None before its first batch of
        this signature."""

    def tell(self, stage: int, signature: Signature, learned: Any) -> None:
        """Record the boundary of virtual stage `stage`, which runs on another rank."""

    def forward(
        self, stage: int, received: tuple[Tensor, ...], signature: Signature, call: Callable[[nn.Module], Any]
    ) -> Any:
        """Run a virtual stage.

        Args:
            received: outputs of the previous virtual stage; empty for the first one.
            signature: signature of the batch.
            call: calls a given module with the batch.

        Returns:
            The tensors that the next virtual stage needs; for the last one, the model's output.
        """

    def names_of(self, stage: int) -> Collection[str] | None:
        """Return the names of the modules (also ZeRO units) that a virtual stage of this rank runs; None:
        all."""

    def places(self) -> Callable[[str], int]:
        """Return a function from the name of a parameter or persistent buffer to its position in the whole
        model's state_dict()."""

    def before_backward(self, stage: int, signature: Signature) -> None:
        """Prepare for the backward of a microbatch of this signature, which may recompute layers."""
