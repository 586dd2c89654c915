"""Curriculum learning by sequence length (`data_efficiency`), after Li et al. 2022 (arXiv:2108.06084).

The length depends only on the optimizer step, counted from 1, so the curriculum needs no state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.config import DataEfficiencyConfig, SeqlenConfig
from launcher.errors import LauncherError


class Curriculum:
    """Computes the sequence length of a step, and truncates batches to it.

    Args:
        metric: the resolved `seqlen` section; None disables truncation.
    """

    def __init__(self, metric: SeqlenConfig | None) -> None:
        self.metric = metric

    @classmethod
    def of(cls, config: DataEfficiencyConfig) -> Curriculum:
        return cls(config.curriculum)

    def seqlen(self, steps_done: int) -> int | None:
        """Return the sequence length of the optimizer step after `steps_done`; None without a curriculum."""
        metric = self.metric
        if metric is None:
            return None
        pace, low, high = metric.schedule_config, metric.min_difficulty, metric.max_difficulty
        assert low is not None and high is not None, "the config was checked"
        if low >= high:  # DeepSpeed starts at `low`, and a length that has reached `high` stays
            return low
        if metric.schedule_type == "fixed_discrete":
            assert pace.difficulty is not None and pace.max_step is not None
            return stepped(steps_done + 1, pace.difficulty, pace.max_step, high)
        assert pace.total_curriculum_step is not None and pace.difficulty_step is not None
        degree = (pace.root_degree or 1) if metric.schedule_type == "fixed_root" else 1
        return rising(steps_done + 1, low, high, pace.total_curriculum_step, pace.difficulty_step, degree)

    def cut(self, batch: Any, steps_done: int) -> Any:
        """Return `batch` truncated for the optimizer step after `steps_done`."""
        length = self.seqlen(steps_done)
        return batch if length is None else cut(batch, length)


def rising(step: int, low: int, high: int, total: int, grain: int, degree: int = 1) -> int:
    """Return the length on a root schedule from `low` at step 0 to `high` at step `total`.

    Args:
        step: optimizer step, from 1.
        low, high: first and last length.
        total: steps until `high` is reached.
        grain: lengths are multiples of it, at least `low`; only `high` itself need not be a multiple.
        degree: degree of the root; 1 is linear.
    """
    length = math.floor((step / total) ** (1.0 / degree) * (high - low) + low)
    return min(high, max(length - length % grain, -(-low // grain) * grain))


def stepped(step: int, lengths: Sequence[int], last_steps: Sequence[int], high: int) -> int:
    """Return the length on a schedule of explicit steps.

    Args:
        step: optimizer step, from 1.
        lengths: the lengths in order.
        last_steps: last step of each length except the last one; increasing.
        high: once a length reaches it, the length no longer changes.
    """
    reached = sum(step > last for last in last_steps)
    return next((length for length in lengths[:reached] if length >= high), lengths[reached])


def cut(batch: Any, length: int) -> Any:
    """Return `batch` with every sequence truncated to its first `length` tokens.

    The number of tokens, S, is taken from `input_ids`, or else from the first integer tensor [batch, S]. All
    tensors [batch, S, ...] are truncated, and masks [batch, heads, S, S] in their last two dims.

    Raises:
        LauncherError: the batch has no token ids.
    """
    tokens = _tokens(batch)
    if tokens <= length:
        return batch
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: _cut_tensor(t, tokens, length), batch)


def _tokens(batch: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves_with_path(batch)
    named = [leaf for path, leaf in leaves if path and getattr(path[-1], "key", None) == "input_ids"]
    for leaf in (*named, *(leaf for _, leaf in leaves)):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return leaf.shape[1]
    raise LauncherError(
        "curriculum learning by sequence length found no token ids of shape [batch, sequence] in the batch",
        where="data_efficiency.data_sampling.curriculum_learning",
        fix="pass input_ids to the model, or disable the section",
    )


def _cut_tensor(tensor: Tensor, tokens: int, length: int) -> Tensor:
    if tensor.dim() >= 2 and tensor.shape[1] == tokens:
        return tensor[:, :length]
    if tensor.dim() == 4 and tensor.shape[3] == tokens:
        rows = length if tensor.shape[2] == tokens else tensor.shape[2]
        return tensor[:, :, :rows, :length]
    return tensor
