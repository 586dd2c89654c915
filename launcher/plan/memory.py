"""Prediction of the memory that the ranks of a layout need, with `launcher.estimate`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from torch import nn
from transformers import PretrainedConfig

from launcher.config.root import load
from launcher.errors import ConfigError
from launcher.estimate.answer import Estimate
from launcher.estimate.attention_kernels import GPU_KERNELS
from launcher.estimate.estimator import Estimator
from launcher.plan.layout import Layout, as_json
from launcher.plan.stages import stage_loads
from launcher.plan.work import ModelWork

ENOUGH, ENOUGH_INTERLEAVED = 2, 3
"""Microbatches per stage from which on more of them do not increase the memory."""


@dataclass
class MemoryPredictor:
    """Predicts the memory of layouts of one model, and caches the results.

    Args:
        model: the model's config, or the model with LoRA adapters on meta.
        work: work of the model, with the sequence length and the costs by which stages are cut.
        dtype: "bf16", "fp16" or "fp32".
        attention: attention kernels of the device.
        refused: layout -> why it cannot run.
    """

    model: PretrainedConfig | nn.Module
    work: ModelWork
    dtype: str = "bf16"
    attention: Collection[str] = GPU_KERNELS
    refused: dict[Layout, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._estimator = Estimator(self.model, self.work.expert_load, self.attention)
        self._known: dict[tuple[Layout, int], Estimate] = {}
        self._kept: dict[Layout, int] = {}

    def of(self, layout: Layout) -> tuple[Estimate, ...]:
        """Return the estimates for one rank each of the stages that may need the most memory.

        These are the first stage, which holds the most microbatches, the last one, which holds the logits,
        and the one with the most blocks.

        Raises:
            ConfigError: the layout cannot run.
        """
        return tuple(self._ranks(layout))

    def _ranks(self, layout: Layout) -> Iterator[Estimate]:
        enough = ENOUGH_INTERLEAVED if layout.schedule == "interleaved" else ENOUGH
        layout = replace(layout, accumulation=min(layout.accumulation, enough * layout.pp))
        config = load(as_json(layout, dtype=self.dtype))
        of_stage = layout.tp * layout.copies
        blocks = [load.blocks for load in stage_loads(self.work, layout).ranks]
        for rank in sorted({0, blocks.index(max(blocks)) * of_stage, layout.world - of_stage}):
            if (layout, rank) not in self._known:
                found = self._estimator.estimate(config, layout.world, rank, self.work.sequence)
                self._known[layout, rank] = found
            yield self._known[layout, rank]

    def kept(self, layout: Layout) -> float:
        """Return a lower bound of the peak bytes that a rank's blocks save for backward."""
        alone = Layout(
            layout.tp, cp=layout.cp, recompute=layout.recompute, sequence_parallel=layout.sequence_parallel
        )
        if alone not in self._kept:  # a single microbatch of one sequence
            try:
                config = load(as_json(alone, dtype=self.dtype))
                self._kept[alone] = self._estimator.kept(config, alone.world, self.work.sequence)
            except ConfigError:  # `peak` records the reason
                self._kept[alone] = 0
        return self._kept[alone] * layout.micro * min(layout.pp, layout.accumulation) / layout.pp

    def peak(self, layout: Layout, enough: float = math.inf) -> int | None:
        """Return the peak bytes on the device of the most loaded rank; None if the layout cannot run.

        Args:
            enough: stop at the first rank that needs more than this.
        """
        if layout in self.refused:
            return None
        try:
            most = 0
            for each in self._ranks(layout):
                most = max(most, each.peak)
                if most > enough:
                    break
            return most
        except ConfigError as error:
            self.refused[layout] = str(error)
            return None
