"""Curriculum learning inside an engine: the JSON's `data_efficiency` over `launcher/engine/lengths.py`."""

from __future__ import annotations

from typing import Any

from launcher.config import DataEfficiencyConfig, SeqlenConfig
from launcher.engine.lengths import cut, rising, stepped


class Curriculum:
    """Says how long sequences are, and cuts them.

    Args:
        metric: the resolved `seqlen` section; None: nothing is cut.
    """

    def __init__(self, metric: SeqlenConfig | None) -> None:
        self.metric = metric

    @classmethod
    def of(cls, config: DataEfficiencyConfig) -> Curriculum:
        return cls(config.curriculum)

    def seqlen(self, steps_done: int) -> int | None:
        """Return the tokens of a sequence in the optimizer step after `steps_done`; None without a curriculum."""
        metric = self.metric
        if metric is None:
            return None
        pace, low, high = metric.schedule_config, metric.min_difficulty, metric.max_difficulty
        assert low is not None and high is not None, "the config was checked"
        if low >= high:  # DeepSpeed starts at `low`, and what has reached `high` stays
            return low
        if metric.schedule_type == "fixed_discrete":
            assert pace.difficulty is not None and pace.max_step is not None
            return stepped(steps_done + 1, pace.difficulty, pace.max_step, high)
        assert pace.total_curriculum_step is not None and pace.difficulty_step is not None
        degree = (pace.root_degree or 1) if metric.schedule_type == "fixed_root" else 1
        return rising(steps_done + 1, low, high, pace.total_curriculum_step, pace.difficulty_step, degree)

    def cut(self, batch: Any, steps_done: int) -> Any:
        """Return `batch` as the optimizer step after `steps_done` sees it."""
        length = self.seqlen(steps_done)
        return batch if length is None else cut(batch, length)
