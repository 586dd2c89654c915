"""`SplitModel` and the options of the split; an unsplit model needs no other module of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.comm import Axis
from launcher.config import PartitionConfig
from launcher.errors import MisplacedCallError
from launcher.tensor.split import Split

if TYPE_CHECKING:
    from launcher.tensor.sequence import SequenceParallel

wants_loss_only: ContextVar[bool] = ContextVar("wants_loss_only", default=False)


@dataclass(frozen=True)
class TensorParallelOptions:
    """The config options for split layers.

    Args:
        overlaps: reduce input gradients while weight gradients are computed (`tp_overlap_comm`).
        sequence: norms, residuals and dropout work on slices of the sequence (`sequence_parallel`).
        split_logits: compute the loss on logits split over the vocabulary (`vocab_parallel_lm_head`); None:
            if the model supports it.
        rules: rules that precede the model's own plan (`partition_config`).
        whole: names of parameters that are not split, because ranks have different ones (experts).
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
        axis: the tp axis; the ep axis for experts.
        splits: name in named_parameters() -> split; parameters without an entry are whole.
        sequence: slices sequences; None: sequences are not sliced.
    """

    axis: Axis
    splits: dict[str, Split] = field(default_factory=dict)
    sequence: SequenceParallel | None = None


def refuse_shards(model: nn.Module) -> None:
    """Make `save_pretrained()` without a state_dict raise: it would write the shards of one rank."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is None:
        raise MisplacedCallError(
            f"{type(model).__name__}.save_pretrained() would write the shards of one tensor-parallel rank",
            where="save_pretrained()",
            fix="call engine.save_16bit_model(DIR) on every rank, or pass "
            "state_dict=engine._consolidated_16bit_state_dict(), which every rank must call",
        )
    return type(model).save_pretrained(model, *args, **kwargs)


@contextmanager
def loss_only() -> Iterator[None]:
    """Keep the logits of forwards with labels split in eval mode, too: they are not read in the context."""
    token = wants_loss_only.set(True)
    try:
        yield
    finally:
        wants_loss_only.reset(token)


def wants_no_logits(model: nn.Module) -> bool:
    """Return whether a forward with labels is for its loss only: it trains, or runs in `loss_only`."""
    return (model.training and torch.is_grad_enabled()) or wants_loss_only.get()
