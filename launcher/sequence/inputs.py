"""Inputs of a forward over a sharded sequence: a rank's slice of the batch, and the context its layers need.

All ranks of the cp axis get the same full batch. Labels are shifted to the tokens that predict them before
the batch is sliced, so that no token needs a label from another rank's slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from launcher.comm import Axis
from launcher.data.documents import IGNORED
from launcher.errors import ConfigError
from launcher.sequence.layout import SequenceLayout
from launcher.sequence.masks import AttentionMask, Kept, MaskRule, SameGroup, rules_of
from launcher.tensor.functions import slice_along

IDS, EMBEDDINGS, LABELS, SHIFTED = "input_ids", "inputs_embeds", "labels", "shift_labels"
MASK, POSITIONS = "attention_mask", "position_ids"
WHERE = "context_parallel"


@dataclass(frozen=True, eq=False)
class SharedSequence:
    """The sequences of one forward.

    Args:
        layout: how they are sharded.
        length: length before padding.
        padded: length after padding.
        own: int64 [S / degree] positions of this rank.
        rules: mask rules of the batch: documents, padding.
        places: int64 [batch or 1, padded]: position ids of all tokens.
        shift_labels: shifted labels of this rank's positions: [B, S / degree]; None: no loss is requested.
        tokens: number of labels on all ranks that are not ignored: int64 [].
        came_in_slices: the batch arrived already sharded; the model's outputs stay sharded, too.
    """

    layout: SequenceLayout
    length: int
    padded: int
    own: Tensor
    rules: tuple[MaskRule, ...]
    places: Tensor
    shift_labels: Tensor | None = None
    tokens: Tensor | None = None
    came_in_slices: bool = False

    def mask(self, function: Callable[..., Any]) -> AttentionMask:
        """Return the mask of a layer type, given its mask function in transformers."""
        documents = self.places if self.packed else torch.arange(self.padded, device=self.own.device)[None]
        return AttentionMask((*rules_of(function, documents), *self.rules), self, self.own.device)

    @property
    def packed(self) -> bool:
        """True if a row contains several documents."""
        return any(isinstance(rule, SameGroup) for rule in self.rules)


current: ContextVar[SharedSequence | None] = ContextVar("current", default=None)
"""The sequence of the current forward; None if its sequences are not sharded."""


def cut(
    batch: Mapping[str, Any], layout: SequenceLayout, axis: Axis
) -> tuple[dict[str, Any], SharedSequence]:
    """Return this rank's slice of a batch, and the sequence it belongs to.

    Args:
        batch: arguments of the model's forward by name, the same on all ranks of cp.
        axis: cp.

    Raises:
        ConfigError: an argument cannot be sharded.
    """
    source = batch.get(IDS) if batch.get(IDS) is not None else batch.get(EMBEDDINGS)
    assert source is not None
    rows, length = source.shape[:2]
    padded, device = layout.padded(length), source.device
    own = layout.positions(padded, axis.rank).to(device)

    def slice_of(x: Tensor, fill: float | bool = 0) -> Tensor:
        return padded_to(x, padded, fill).index_select(1, own)

    positions, kept = batch.get(POSITIONS), batch.get(MASK)
    check_shape(kept, MASK, rows, length)
    check_shape(positions, POSITIONS, rows, length)
    rules = rules_of_batch(positions, kept, rows, padded)
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    found = {
        **batch,
        POSITIONS: slice_of(positions).expand(rows, -1),
        # Never None, and unsharded: without a mask, gaps in a slice's positions would be taken for documents.
        MASK: torch.ones(rows, padded, dtype=torch.bool, device=device)
        if kept is None
        else padded_to(kept, padded, 0),
    }
    for key, value in batch.items():  # includes other ids, such as token_type_ids
        of_tokens = isinstance(value, Tensor) and value.shape[:2] == (rows, length)
        if of_tokens and key == EMBEDDINGS and value.requires_grad:
            found[key] = _own_slice(padded_to(value, padded, 0), layout, axis)
        elif of_tokens and (key == EMBEDDINGS or key.endswith("_ids")) and key != POSITIONS:
            found[key] = slice_of(value)
    places = padded_to(positions, padded, 0)
    if batch.get(LABELS) is None:  # with shifted labels only, a model computes no loss
        return found, SharedSequence(layout, length, padded, own, rules, places)
    shifted, ignored = labels_of_next(batch), batch.get("ignore_index", IGNORED)
    assert shifted is not None
    found.pop(SHIFTED, None)
    found[LABELS] = mine = slice_of(shifted, ignored)
    tokens = (shifted != ignored).sum()
    return found, SharedSequence(layout, length, padded, own, rules, places, mine, tokens)


def _own_slice(embeddings: Tensor, layout: SequenceLayout, axis: Axis) -> Tensor:
    """Return this rank's slice: [B, S, hidden] -> [B, S / degree, hidden]. In backward, every rank gets the
    gradient of the full embeddings, because the caller computed all of them on every rank."""
    order = layout.order(embeddings.shape[1]).to(embeddings.device)
    mine = slice_along(embeddings.index_select(1, order), axis, 1, "root/embeddings")
    # undoes the scaling by the cp degree: see [Note: The gradient of a shared loss]
    mine.register_hook(lambda gradient: gradient / axis.degree)
    return mine


def check_shape(given: Any, name: str, rows: int, length: int) -> None:
    """Raise ConfigError for a mask or positions whose shape does not match the tokens of the batch."""
    if given is None:
        return
    shape = tuple(given.shape) if isinstance(given, Tensor) else None
    if shape == (rows, length) or (shape == (1, length) and name == POSITIONS):
        return
    what = type(given).__name__ if shape is None else f"tensor of shape {shape}"
    raise ConfigError(
        f"{name} is a {what}, but the sequences have shape {(rows, length)}",
        where=WHERE,
        fix="pass a tensor with the shape of input_ids; to separate packed documents, pass position_ids that restart "
        "at each document",
    )


def rules_of_batch(
    positions: Tensor | None, kept: Tensor | None, rows: int, padded: int
) -> tuple[MaskRule, ...]:
    """Return the mask rules that a batch adds to those of the layers.

    Args:
        positions: int64 [batch or 1, S]: documents begin where they are not consecutive; None: one document.
        kept: [batch, S], 0 for padding. As in transformers, documents are not detected if it is given.
        rows: rows of the batch.
        padded: length of the padded sequence, to which the rules apply.
    """
    if kept is not None:
        return () if bool(kept.all()) else (Kept(padded_to(kept.bool(), padded, False)),)
    if positions is None:
        return ()
    starts = positions.expand(rows, -1).diff(dim=1) != 1
    if not bool(starts.any()):
        return ()
    return (SameGroup(padded_to(pad(starts, (1, 0)).cumsum(1), padded, padded)),)


def labels_of_next(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the label that each position predicts, -100 if none: [batch, S]; None without labels."""
    labels, shifted = batch.get(LABELS), batch.get(SHIFTED)
    if shifted is None and labels is not None:
        shifted = pad(labels, (0, 1), value=batch.get("ignore_index", IGNORED))[:, 1:]
    return shifted


def refused(model: nn.Module, why: str) -> ConfigError:
    """Return the error for a model, or a module in it, that cannot work on slices of a sequence."""
    return ConfigError(
        f"{type(model).__name__} {why}, so its sequences cannot be sharded (context parallelism)",
        where=WHERE,
        fix="remove the section for this model, or use tensor parallelism instead (tensor_parallel)",
    )


def padded_to(x: Tensor, length: int, fill: float | bool) -> Tensor:
    """Return [B, S, ...] padded with `fill` at the end to `length`."""
    more = length - x.shape[1]
    return x if not more else torch.cat([x, x.new_full((x.shape[0], more, *x.shape[2:]), fill)], 1)
