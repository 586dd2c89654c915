"""The memory that the ranks of a layout need, by the estimator."""

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
"""Microbatches for each stage; with more of them no more is held at once."""


@dataclass
class MemoryPredictor:
    """Answers for one model, and remembers.

    Args:
        model: its config; or the model with LoRA adapters, on meta.
        work: of the model: how long sequences are, and by what stages are cut.
        dtype: "bf16", "fp16" or "fp32".
        attention: kernels of the device.
        refused: why layouts cannot run, by layout.
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
        """Return the first ranks of the first stage, which holds most microbatches, of the last, which has the logits,
        and of the one with most blocks.

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
        """Return the bytes that blocks of a rank keep, at least, when most microbatches are between forward and
        backward."""
        alone = Layout(
            layout.tp, cp=layout.cp, recompute=layout.recompute, sequence_parallel=layout.sequence_parallel
        )
        if alone not in self._kept:  # one microbatch of one sequence
            try:
                config = load(as_json(alone, dtype=self.dtype))
                self._kept[alone] = self._estimator.kept(config, alone.world, self.work.sequence)
            except ConfigError:  # whoever asks for the peak hears why
                self._kept[alone] = 0
        return self._kept[alone] * layout.micro * min(layout.pp, layout.accumulation) / layout.pp

    def peak(self, layout: Layout, enough: float = math.inf) -> int | None:
        """Return the bytes of the device that the rank with most needs; None where the layout cannot run.

        Args:
            enough: the first rank that needs more is not followed by others.
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
