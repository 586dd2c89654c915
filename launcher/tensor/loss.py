"""The loss of a causal LM whose logits are split over the vocabulary.

Each rank has the logits of vocabulary ids [first, first + width). For each token the loss needs three numbers
over all logits: the largest, the sum of exponentials, and the target's logit. Each is combined from one
number per rank, so the only communication is an all-gather of 3 fp32 numbers per token. The backward needs no
communication, because the gradient of a logit depends only on these numbers and the logit:

largest, total    M = max of x, S = sum of exp(x - M), over the whole vocabulary
loss              log S + M - x[target]
gradient          exp(x - M) / S - 1[target], on this rank's columns

Logits are processed a few rows at a time: no fp32 copy of all logits is made, and only the logits are saved
for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from launcher.comm import Axis, all_gather
from launcher.errors import LauncherError

IGNORED = -100
_TILE, _DEVICE_TILE = (
    1 << 20,
    1 << 24,
)  # elements per tile: small for CPU caches, larger on a device to amortise kernel launches
_PIECES = 64  # most tiles: a tile of large logits is still small compared to them
_TERMS = 3  # numbers that a rank sends per token

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class LossOptions:
    """The settings of the loss on a rank's columns; see `vocab_parallel_cross_entropy`."""

    start: int
    vocabulary: int
    ignore_index: int = IGNORED

    def own(self, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return a mask of the labels [T] that are this rank's ids, and their columns (any column for
        others)."""
        column = labels - self.start
        return (column >= 0) & (column < width), column.clamp(0, width - 1)


@dataclass(frozen=True)
class LogitStatistics:
    """Statistics over all logits of each token, [T] each: the largest logit, the sum of exp(logit - largest),
    and the target's logit."""

    largest: Tensor
    total: Tensor
    target: Tensor


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    start: int,
    vocabulary: int,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the cross entropy of logits that are split over the ranks of `axis`: the same fp32 value on all
    ranks. Each rank gets the gradient of its own logits, in their dtype. Every rank must call it.

    Args:
        logits: logits of this rank, [..., its share of the vocabulary]; shares may be uneven, and may be
            empty.
        labels: vocabulary ids [...], the same on all ranks.
        start: vocabulary id of the first column.
        vocabulary: total number of ids on all ranks.
        ignore_index: tokens with this label have no loss.
        reduction: over the tokens with a loss; "none" returns [...], with 0 for ignored tokens.

    Raises:
        LauncherError: the shapes do not fit, or a label is neither a vocabulary id nor `ignore_index`.
    """
    if logits.shape[:-1] != labels.shape:
        raise LauncherError(
            f"logits of shape {tuple(logits.shape)} do not match labels of shape {tuple(labels.shape)}",
            fix="pass one label for each row of logits",
        )
    settings = LossOptions(start, vocabulary, ignore_index)
    labels = labels.to(logits.device)
    _check(labels, settings)
    rows = logits.reshape(labels.numel(), logits.shape[-1])
    losses: Tensor = _CrossEntropy.apply(rows, labels.reshape(-1), axis, settings)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (labels != ignore_index).sum()


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    *,
    axis: Axis,
    start: int,
    vocabulary: int,
    **kwargs: object,
) -> Tensor:
    """Return the loss of transformers' ForCausalLMLoss, on split logits: each token predicts the next label.

    Args:
        logits: logits of this rank, [B, S, its share of the vocabulary].
        labels: [B, S]; ignored if `shift_labels` is given.
        vocab_size: ignored, as are `kwargs`; models pass them.
        num_items_in_batch: the sum is divided by this number, not by the number of tokens with a loss.
        shift_labels: labels that are already shifted.
        axis, start, vocabulary: as in `vocab_parallel_cross_entropy`.
    """
    if shift_labels is None:
        if labels is None:
            raise LauncherError("the loss has no labels", fix="pass labels or shift_labels to the model")
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = vocab_parallel_cross_entropy(
        logits.reshape(logits.shape[:-1].numel(), logits.shape[-1]),
        shift_labels.reshape(-1),
        axis,
        start=start,
        vocabulary=vocabulary,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    return loss / torch.as_tensor(num_items_in_batch, device=loss.device)


class _CrossEntropy(torch.autograd.Function):
    """Computes the losses [T] of logits [T, width] and labels [T]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, settings: LossOptions) -> Tensor:
        parts = logits.new_empty((axis.degree, _TERMS, len(labels)), dtype=_wide(logits))
        fill_terms(parts[axis.rank], logits, labels, settings)
        all_gather(parts.view(-1), axis, "head/loss").wait()
        whole = combine(parts)
        ctx.save_for_backward(logits, labels, whole.largest, whole.total)
        ctx.settings = settings
        return losses(whole, labels, settings)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, largest, total = ctx.saved_tensors
        return gradient(logits, labels, largest, total, upstream, ctx.settings), None, None, None


def fill_terms(terms: Tensor, logits: Tensor, labels: Tensor, settings: LossOptions) -> None:
    """Compute this rank's terms of the statistics of each token.

    Args:
        terms: the output, [3, T]: the largest logit, sum of exp(logit - largest), and the target's logit or
            0.
        logits: [T, width].
    """
    width = logits.shape[1]
    terms.zero_()
    terms[0] = float("-inf")
    if width == 0:
        return
    for rows in _tiles(logits):
        x = logits[rows].to(terms.dtype)
        largest = x.amax(-1, keepdim=True)
        terms[0, rows] = largest.squeeze(-1)
        # If all logits of this rank are masked by -inf, the difference would be NaN.
        anchor = largest.masked_fill_(largest == float("-inf"), 0)
        terms[1, rows] = (x - anchor).exp_().sum(-1)
    mine, column = settings.own(labels, width)
    terms[2] = logits.gather(1, column[:, None]).squeeze(1).masked_fill(~mine, 0)


def combine(parts: Tensor) -> LogitStatistics:
    """Combine the terms of all ranks [degree, 3, T] into statistics over the whole vocabulary."""
    largest = parts[:, 0].amax(0)
    total = (parts[:, 1] * (parts[:, 0] - largest).exp()).sum(0)
    return LogitStatistics(largest, total, parts[:, 2].sum(0))


def losses(whole: LogitStatistics, labels: Tensor, settings: LossOptions) -> Tensor:
    """Return the loss of each token [T]; 0 for ignored tokens."""
    loss = whole.total.log() + (whole.largest - whole.target)
    return loss.masked_fill_(labels == settings.ignore_index, 0)


def gradient(
    logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, upstream: Tensor, settings: LossOptions
) -> Tensor:
    """Return the gradient of this rank's logits [T, width], in their dtype.

    Args:
        largest, total: of the whole vocabulary, [T] each.
        upstream: gradient of each token's loss [T].
    """
    gradient = torch.empty_like(logits)
    upstream = upstream.masked_fill(labels == settings.ignore_index, 0)  # NaN from a mean over no tokens
    scale = upstream / total
    for rows in _tiles(logits):
        # Compute in place in one copy: mixed dtypes would create another copy on a CPU.
        part = logits[rows].to(total.dtype, copy=True).sub_(largest[rows, None])
        part.exp_().mul_(scale[rows, None])
        mine, column = settings.own(labels[rows], logits.shape[1])
        part[torch.arange(len(part), device=part.device), column] -= upstream[rows].masked_fill(~mine, 0)
        gradient[rows] = part
        del part  # free it before the next one is allocated
    return gradient


def _tiles(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of logits [T, width], a few rows each; none if there are no columns."""
    tokens, width = logits.shape
    if width:
        step = max(
            1, (_TILE if logits.device.type == "cpu" else _DEVICE_TILE) // width, -(-tokens // _PIECES)
        )
        for first in range(0, tokens, step):
            yield slice(first, min(first + step, tokens))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _check(labels: Tensor, settings: LossOptions) -> None:
    """Check that labels are vocabulary ids: without this check, no rank would notice any other label."""
    wrong = (labels != settings.ignore_index) & ((labels < 0) | (labels >= settings.vocabulary))
    if labels.device.type != "cpu":  # avoids a device synchronisation, as torch's own loss does
        torch._assert_async(~wrong.any(), "a label is not in the vocabulary")
        return
    if wrong.any():
        label = int(labels[wrong][0])
        raise LauncherError(
            f"label {label} is out of range for {settings.vocabulary} vocabulary ids",
            fix=f"use 0 to {settings.vocabulary - 1}, or {settings.ignore_index} to ignore a token",
        )
