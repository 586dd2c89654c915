"""`data_efficiency`: curriculum learning by the length of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from launcher.config.section import Conflict, Remark, Section
from launcher.config.values import Count, WholeNumber, WholeNumbers

METRIC = "data_sampling.curriculum_learning.curriculum_metrics.seqlen"
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
        """Keys that a curriculum needs and that are not written."""
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, key) is None:
                yield key
        for key in NEEDED.get(self.schedule_type or "", ()):
            if getattr(self.schedule_config, key) is None:
                yield f"schedule_config.{key}"

    def refused(self) -> Iterator[tuple[str, str, str]]:
        """(key, why, way out) of what asks for more than cutting."""
        chooses = "needs DeepSpeed's index files of the data: here sequences are cut to the length, not chosen by it"
        for key in ("index_to_sample_path", "index_to_metric_path"):
            if getattr(self, key) is not None:
                yield key, chooses, "delete it to cut every sequence to the present length"
        if self.difficulty_type == "percentile":
            yield "difficulty_type", f'"percentile" {chooses}', 'write "value", and difficulties in tokens'
        if self.clustering_type == "schedule_based":
            yield "clustering_type", f'"schedule_based" {chooses}', 'write "single_cluster"'
        if self.schedule_type == "custom":
            others = 'use "fixed_linear", "fixed_root" or "fixed_discrete"'
            yield "schedule_type", '"custom" needs a function of Python, which JSON cannot hold', others

    def crossed(self) -> Iterator[tuple[str, str, str]]:
        """(key, what is wrong, way out) of numbers that do not fit together."""
        low, high, pace = self.min_difficulty, self.max_difficulty, self.schedule_config
        if isinstance(low, int) and isinstance(high, int) and high < low:
            yield "max_difficulty", f"{high} is below min_difficulty {low}", "swap the two"
        lists = isinstance(pace.difficulty, tuple) and isinstance(pace.max_step, tuple)
        if self.schedule_type == "fixed_discrete" and lists:
            assert pace.difficulty is not None and pace.max_step is not None
            if len(pace.difficulty) != len(pace.max_step) + 1:
                what = f"has {len(pace.max_step)} entries for {len(pace.difficulty)} of difficulty"
                yield "schedule_config.max_step", what, "write one entry less: the last difficulty has no end"
            elif list(pace.max_step) != sorted(set(pace.max_step)):
                yield (
                    "schedule_config.max_step",
                    "must rise",
                    "write the last step of each difficulty, in order",
                )


class CurriculumMetricsConfig(Section):
    """What makes a sequence hard."""

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
        "data_cluster_path": "sequences are cut, not chosen, so there are no clusters to write"
    }


class DataSamplingConfig(Section):
    """Which data is trained on."""

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
        "data_sampling": "`seqlen` cuts sequences to the present length; DeepSpeed chooses sequences by index files",
    }

    @property
    def sampling(self) -> DataSamplingConfig | None:
        """`data_sampling` when it is on."""
        return self.data_sampling if self.enabled is True and self.data_sampling.enabled is True else None

    @property
    def curriculum(self) -> SeqlenConfig | None:
        """The curriculum when it is on."""
        learning = self.sampling.curriculum_learning if self.sampling else None
        return learning.curriculum_metrics.seqlen if learning and learning.enabled is True else None

    def conflicts(self) -> Iterator[Conflict]:
        learning = self.data_sampling.curriculum_learning
        if not (self.sampling and learning.enabled is True):
            return
        metric = self.curriculum
        if metric is None:
            key = "data_sampling.curriculum_learning.curriculum_metrics"
            what = "is required where curriculum_learning.enabled is true"
            yield Conflict((key,), what, 'write {"seqlen": {"min_difficulty": 64, ...}}')
            return
        for key in metric.missing():
            yield Conflict(
                (f"{METRIC}.{key}",), "is required where curriculum_learning.enabled is true", "write it"
            )
        for key, what, fix in (*metric.refused(), *metric.crossed()):
            yield Conflict((f"{METRIC}.{key}",), what, fix)

    def remarks(self) -> Iterator[Remark]:
        inner = self.data_sampling.curriculum_learning.enabled is True
        if inner and self.sampling is None:
            key = "enabled" if self.enabled is not True else "data_sampling.enabled"
            yield Remark(
                "data_sampling.curriculum_learning.enabled", f"is off, because data_efficiency.{key} is false"
            )
        step = self.curriculum.schedule_config.difficulty_step if self.curriculum else None
        if isinstance(step, int) and step % 8:
            what = f"{step} is no multiple of 8: tensor cores of GPUs are used less well"
            yield Remark(f"{METRIC}.schedule_config.difficulty_step", what)
