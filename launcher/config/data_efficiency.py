"""`data_efficiency`: curriculum learning by the length of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from launcher.config.section import Section
from launcher.config.values import Count, WholeNumber, WholeNumbers

NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}
"""Schedule type -> the keys of its schedule_config."""


class CurriculumScheduleConfig(Section):
    """Numbers of the pace; which ones are needed follows from `schedule_type`."""

    total_curriculum_step: Count | None = None
    """fixed_linear, fixed_root: optimizer steps from min_difficulty to max_difficulty."""

    difficulty_step: Count | None = None
    """fixed_linear, fixed_root: lengths are multiples of this; 8 or more suits tensor cores."""

    root_degree: Count | None = None
    """fixed_root: 2 is a square root, which rises fast at first; 1 is fixed_linear."""

    difficulty: WholeNumbers | None = None
    """fixed_discrete: the lengths, one after the other."""

    max_step: WholeNumbers | None = None
    """fixed_discrete: the last optimizer step of each length but the last one, which stays."""


class SeqlenConfig(Section):
    """Length of the sequences, in tokens (Li et al. 2022, arXiv:2108.06084)."""

    difficulty_type: Literal["value", "percentile"] = "value"
    """"value": difficulties are lengths. "percentile" needs DeepSpeed's index files and is refused."""

    clustering_type: Literal["single_cluster", "schedule_based"] = "single_cluster"
    """"single_cluster": all sequences are cut. "schedule_based" needs DeepSpeed's index files and is refused."""

    index_to_sample_path: str | None = None
    """DeepSpeed's file of sequences by difficulty; refused, because sequences are cut here, not chosen."""

    index_to_metric_path: str | None = None
    """DeepSpeed's file of difficulties; refused, because sequences are cut here, not chosen."""

    min_difficulty: Count | None = None
    """Tokens of a sequence at the start."""

    max_difficulty: Count | None = None
    """Tokens of a sequence at the end: longer ones stay cut to it."""

    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    """Pace from min to max: along a line, a root, in written steps. "custom" needs a function and is refused."""

    schedule_config: CurriculumScheduleConfig = Field(
        default_factory=CurriculumScheduleConfig.model_construct
    )
    """Numbers of the pace."""

    def missing(self) -> Iterator[str]:
        """Find keys that a curriculum needs and that are not written."""
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, key) is None:
                yield key
        for key in NEEDED.get(self.schedule_type or "", ()):
            if getattr(self.schedule_config, key) is None:
                yield f"schedule_config.{key}"


class CurriculumMetricsConfig(Section):
    """The measures of how hard a sequence is."""

    seqlen: SeqlenConfig | None = None
    """Its length."""


class CurriculumLearningConfig(Section):
    """Easy sequences first."""

    enabled: bool = False
    """Cut the sequences of a batch to a length that grows with the optimizer steps, in training only."""

    curriculum_metrics: CurriculumMetricsConfig = Field(
        default_factory=CurriculumMetricsConfig.model_construct
    )
    """Metrics by name; `seqlen` is the one that needs no analysis of the data before the run."""

    data_cluster_path: str | None = None
    """DeepSpeed's directory for clusters of sequences."""

    without_effect: ClassVar[dict[str, str]] = {
        "data_cluster_path": "sequences are truncated, not selected, so there are no clusters to write"
    }


class DataSamplingConfig(Section):
    """The choice of the data that is trained on."""

    enabled: bool = False
    """The keys of this section count; false: none of them, `curriculum_learning` included."""

    num_epochs: Count = 1000
    """train_batch() ends with an error after so many passes over initialize(training_data=...); recipes refuse a run
    that is longer."""

    num_workers: WholeNumber = 0
    """Processes that load initialize(training_data=...); 0 loads in the rank itself. Recipes read memory maps, in the
    rank itself."""

    pin_memory: bool = False
    """initialize(training_data=...): batches in page-locked memory, from which copies to a GPU are asynchronous."""

    curriculum_learning: CurriculumLearningConfig = Field(
        default_factory=CurriculumLearningConfig.model_construct
    )
    """Easy sequences first."""


class DataEfficiencyConfig(Section):
    """Data that is chosen or cut, so that less of it is needed (Li et al. 2022, arXiv:2212.03597)."""

    enabled: bool = False
    """The keys of this section count; false: none of them."""

    seed: WholeNumber = 1234
    """Order of initialize(training_data=...); the order of the recipes follows their flag --seed."""

    data_sampling: DataSamplingConfig = Field(default_factory=DataSamplingConfig.model_construct)
    """Which data is trained on."""

    differs: ClassVar[dict[str, str]] = {
        "enabled": "false turns off what is inside; DeepSpeed looks at the inner switches only",
        "seed": "orders initialize(training_data=...) only; the recipes have a flag for it",
        "data_sampling": "`seqlen` truncates sequences to the current length; DeepSpeed selects sequences "
        "by index files",
    }

    @property
    def sampling(self) -> DataSamplingConfig | None:
        """Return `data_sampling` when it is on."""
        return self.data_sampling if self.enabled is True and self.data_sampling.enabled is True else None

    @property
    def curriculum(self) -> SeqlenConfig | None:
        """Return the curriculum when it is on."""
        learning = self.sampling.curriculum_learning if self.sampling else None
        return learning.curriculum_metrics.seqlen if learning and learning.enabled is True else None
