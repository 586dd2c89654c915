"""A model split over the tp axis, and how it is to be; a model that is not split needs no more of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from launcher.comm import Axis
from launcher.config import PartitionConfig
from launcher.tensor.split import Split

if TYPE_CHECKING:
    from launcher.tensor.sequence import SequenceParallel

wants_loss_only: ContextVar[bool] = ContextVar("wants_loss_only", default=False)


@dataclass(frozen=True)
class TensorParallelOptions:
    """The options of the JSON about the split layers.

    Args:
        overlaps: input gradients are reduced while weight gradients are computed (`tp_overlap_comm`).
        sequence: norms, residuals and dropout work on slices of the sequence (`sequence_parallel`).
        split_logits: the loss is computed on logits split over the vocabulary (`vocab_parallel_lm_head`); None: where
            the model allows it.
        rules: come before the model's own plan (`partition_config`).
        whole: parameters that are left as they are: ranks have different ones (experts).
    """

    overlaps: bool = True
    sequence: bool = False
    split_logits: bool | None = None
    rules: PartitionConfig | None = None
    whole: frozenset[str] = frozenset()


@dataclass
class SplitModel:
    """A model after the split.

    Args:
        axis: tp; of experts ep.
        splits: of parameters, by the name that named_parameters() gives; those that are not named are whole.
        sequence: what slices sequences; None: nothing does.
    """

    axis: Axis
    splits: dict[str, Split] = field(default_factory=dict)
    sequence: SequenceParallel | None = None


@contextmanager
def loss_only() -> Iterator[None]:
    """Inside, nobody reads the logits of a forward with labels: they stay split in eval mode, too."""
    token = wants_loss_only.set(True)
    try:
        yield
    finally:
        wants_loss_only.reset(token)


def wants_no_logits(model: nn.Module) -> bool:
    """Return whether a forward with labels under way is for its loss alone: it trains, or runs in `loss_only`."""
    return (model.training and torch.is_grad_enabled()) or wants_loss_only.get()
