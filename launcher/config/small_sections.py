"""The small sections: `activation_checkpointing`, `compile`, `expert_parallel` and `data_efficiency`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from launcher.config.section import Count, Section, WholeNumber, WholeNumbers


class ActivationCheckpointingConfig(Section):
    """Recompute the inside of transformer blocks in backward (Chen et al. 2016, arXiv:1604.06174).

    DeepSpeed reads this section only for models that call its own checkpoint function. Here its presence
    checkpoints the blocks of every model; remove the section to keep all activations. A block whose inside
    calls `launcher.checkpointing.checkpoint` is recomputed once, not twice.
    """

    differs: ClassVar[dict[str, str]] = {
        "number_checkpoints": "limits how many blocks are checkpointed; DeepSpeed only sizes a buffer with it",
        "contiguous_memory_optimization": "needs neither `partition_activations` nor `number_checkpoints`",
        "profile": "times are printed every `steps_per_print` steps, or once at the end, not at every checkpoint",
    }

    number_checkpoints: Count | None = None
    """Largest number of blocks that are checkpointed, spread evenly over the depth; null: all."""

    partition_activations: bool = False
    """Each tensor-parallel rank keeps 1/N of the saved inputs, and gathers them before it recomputes. With one
    tensor-parallel rank that is the whole input, and nothing is sent."""

    cpu_checkpointing: bool = False
    """The saved inputs of checkpointed blocks wait in host memory, page-locked where there is a GPU, and the device
    holds none between forward and backward. An input is copied out while its block runs; in backward, that of the block
    before is copied in while a block is recomputed. Acts alone or with `partition_activations`, with which each rank's
    part is what is copied."""

    contiguous_memory_optimization: bool = False
    """The saved inputs lie in one buffer with a place for each checkpointed block, made in the first forward: less
    fragmentation, for one copy more. An input that does not fit into a place gets memory of its own."""

    synchronize_checkpoint_boundary: bool = False
    """The device's queued work is waited for before and after each forward and each recomputation of a block."""

    profile: bool = False
    """Rank 0 prints the milliseconds a step that each checkpointed block takes forward and in recomputation, every
    `steps_per_print` steps; where that is null, the mean at the end of the run. On a GPU the queued work is
    waited for at both ends of what is timed."""


class CompileConfig(Section):
    """torch.compile, as DeepSpeed 0.14 and 0.15 had it in the JSON. Off when the section is left out or empty.

    Each transformer block is compiled by itself; gathers, reductions and checkpoints stay outside of the graphs. With
    "inductor" so is Adam's step of 16-bit parameters on the CPU, where there is a compiler: 1.2 times as fast.
    In DeepSpeed since 0.16 the section holds the keys of DeepCompile. They are taken and have no effect, except those
    that move memory to the host: these are refused. `Engine.compile()` is there as in DeepSpeed.
    """

    differs: ClassVar[dict[str, str]] = {
        "enabled": "the blocks are compiled one by one; DeepSpeed 0.14 compiled the whole module",
        "disable": "a key of DeepSpeed 0.14; newer ones refuse it",
        "backend": "a key of DeepSpeed 0.14 and 0.15; newer ones refuse it",
        "kwargs": "a key of DeepSpeed 0.14 and 0.15; newer ones refuse it",
    }

    enabled: bool | None = None
    """The blocks are compiled. Null: they are when `disable` is false or `backend` is written."""

    disable: bool | None = None
    """True: nothing is compiled; false: the blocks are. Null says nothing."""

    backend: str | None = None
    """The backend of torch.compile; null: "inductor"."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of torch.compile, for example {"dynamic": true}."""

    @property
    def on(self) -> bool:
        """Return whether the blocks are to be compiled."""
        if self.enabled is not None:
            return self.enabled
        return self.disable is False or (self.disable is None and self.backend is not None)


class ExpertParallelConfig(Section):
    """The experts of a Hugging Face mixture-of-experts model are spread over neighbouring ranks (Lepikhin et al. 2020,
    arXiv:2006.16668).

    These ranks are part of the data-parallel ones, and of those that share a sequence: the section takes no ranks away
    from others. Tokens go to the experts and back. ZeRO shards experts over the ranks that
    have the same ones. Any type of model works whose experts transformers calls through `ExpertsInterface`.
    """

    aliases: ClassVar[dict[str, str]] = {"ep_size": "size"}
    acts_without_switch: ClassVar[frozenset[str]] = frozenset(
        {"size", "bias_update_rate", "capacity_factor", "global_balance_loss", "router_z_loss_coef"}
    )
    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"size", "autoep_size", "capacity_factor"})
    differs: ClassVar[dict[str, str]] = {
        "size": "a key of this launcher, the ranks that share the experts of each layer; DeepSpeed has autoep_size",
        "bias_update_rate": "a key of this launcher",
        "capacity_factor": "a key of this launcher",
        "global_balance_loss": "a key of this launcher",
        "router_z_loss_coef": "a key of this launcher",
        "autoep_size": "any model with experts, at every ZeRO stage; it need not divide the number of experts",
    }

    size: WholeNumber = 0
    """Ranks that share the experts of each layer, each with about as many; 0 and 1: every rank has all."""

    enabled: bool = False
    """`autoep_size` applies."""

    autoep_size: Count = 1
    """The same as `size`, where `enabled` is true."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """After each step, the correction bias of a router goes up by this for experts that got less than an even share of
    the tokens, and down for the others (Wang et al. 2024, arXiv:2408.15664): balance without a loss. The model must
    have such a bias, as DeepSeek-V3 and GLM-4.5 do. 0: it stays. It acts with all experts on every rank, too."""

    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """In training, an expert takes at most this times an even share of a rank's tokens; beyond it, those with the
    smallest weights are dropped (Lepikhin et al. 2020, arXiv:2006.16668). null: no token is dropped. It acts with all
    experts on every rank, too."""

    global_balance_loss: bool = False
    """The model's balance loss of its routers counts the tokens of all data-parallel ranks and of the step's
    microbatches so far, instead of each microbatch by itself (Qiu et al. 2025, arXiv:2501.11873). The model must
    compute it (`output_router_logits` in its config.json)."""

    router_z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """This times the mean square of the log-sum-exp of a router's logits is added to that loss, so that logits stay
    small (Zoph et al. 2022, arXiv:2202.08906)."""

    @property
    def degree(self) -> int:
        """Return how many ranks share the experts, at least 1."""
        named = [self.size] if self.enabled is not True else [self.size, self.autoep_size]
        return max([1, *(size for size in named if isinstance(size, int))])


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


NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}
"""Schedule type -> the keys of its schedule_config."""


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
