"""The small sections: `activation_checkpointing`, `compile`, `expert_parallel` and `data_efficiency`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from launcher.config.section import Count, Section, WholeNumber, WholeNumbers


class ActivationCheckpointingConfig(Section):
    """Recompute transformer blocks in backward (Chen et al. 2016, arXiv:1604.06174).

    DeepSpeed reads this section only for models that call its own checkpoint function. Here its presence
    enables checkpointing of the blocks of every model; remove the section to keep all activations. A block
    that calls `launcher.checkpointing.checkpoint` inside is recomputed once, not twice.
    """

    differs: ClassVar[dict[str, str]] = {
        "number_checkpoints": "limits how many blocks are checkpointed; DeepSpeed only sizes a buffer with it",
        "contiguous_memory_optimization": "needs neither `partition_activations` nor `number_checkpoints`",
        "profile": "times are printed every `steps_per_print` steps, or once at the end, not at every checkpoint",
    }

    number_checkpoints: Count | None = None
    """Maximum number of blocks to checkpoint, spread evenly over the depth. Null: all."""

    partition_activations: bool = False
    """Each tensor-parallel rank stores 1/N of the saved inputs, which are gathered before recomputation. With
    one tensor-parallel rank, the whole input is stored and nothing is sent."""

    cpu_checkpointing: bool = False
    """Keep the saved inputs of checkpointed blocks in host memory, page-locked if there is a GPU; the device
    holds none of them between forward and backward. An input is copied out while its block runs; in backward,
    the input of the preceding block is copied in while a block is recomputed. Combined with
    `partition_activations`, only each rank's part is copied."""

    contiguous_memory_optimization: bool = False
    """Store the saved inputs in one buffer with a slot for each checkpointed block, allocated in the first
    forward: less fragmentation, at the cost of one more copy. An input that does not fit into its slot gets
    its own memory."""

    synchronize_checkpoint_boundary: bool = False
    """Synchronize with the device before and after each forward and each recomputation of a block."""

    profile: bool = False
    """Rank 0 prints the milliseconds per step of each checkpointed block, in forward and in recomputation,
    every `steps_per_print` steps; if that is null, the mean at the end of the run. On a GPU, each timed range
    starts and ends with a synchronization."""


class CompileConfig(Section):
    """torch.compile, with the keys of DeepSpeed 0.14 and 0.15. Off if the section is missing or empty.

    Each transformer block is compiled separately; gathers, reductions and checkpoints stay outside of the
    graphs. With "inductor", Adam's step of 16-bit parameters on the CPU is compiled too, if there is a
    compiler: 1.2 times as fast.
    Since DeepSpeed 0.16 the section holds the keys of DeepCompile. They are accepted and ignored, except
    those that move memory to the host, which are refused. `Engine.compile()` works as in DeepSpeed.
    """

    differs: ClassVar[dict[str, str]] = {
        "enabled": "each block is compiled separately; DeepSpeed 0.14 compiled the whole module",
        "disable": "a key of DeepSpeed 0.14; newer versions reject it",
        "backend": "a key of DeepSpeed 0.14 and 0.15; newer versions reject it",
        "kwargs": "a key of DeepSpeed 0.14 and 0.15; newer versions reject it",
    }

    enabled: bool | None = None
    """Compile the blocks. Null: compile them if `disable` is false or `backend` is set."""

    disable: bool | None = None
    """True: compile nothing. False: compile the blocks. Null: not set."""

    backend: str | None = None
    """The backend of torch.compile. Null: "inductor"."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of torch.compile, for example {"dynamic": true}."""

    @property
    def on(self) -> bool:
        """Return whether the blocks are compiled."""
        if self.enabled is not None:
            return self.enabled
        return self.disable is False or (self.disable is None and self.backend is not None)


class ExpertParallelConfig(Section):
    """Expert parallelism: the experts of a Hugging Face MoE model are distributed over neighbouring ranks.

    The expert-parallel ranks are among the data-parallel ranks and those that share a sequence: the section
    does not reduce any other degree. Tokens are sent to the experts and back (Lepikhin et al. 2020,
    arXiv:2006.16668). ZeRO shards experts over the ranks that hold the same ones. All model types work whose
    experts transformers calls through `ExpertsInterface`.
    """

    aliases: ClassVar[dict[str, str]] = {"ep_size": "size"}
    acts_without_switch: ClassVar[frozenset[str]] = frozenset(
        {"size", "bias_update_rate", "capacity_factor", "global_balance_loss", "router_z_loss_coef"}
    )
    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"size", "autoep_size", "capacity_factor"})
    differs: ClassVar[dict[str, str]] = {
        "size": "a key of this launcher: the expert-parallel degree; DeepSpeed has autoep_size",
        "bias_update_rate": "a key of this launcher",
        "capacity_factor": "a key of this launcher",
        "dispatch": "a key of this launcher; used if more than one rank shares the experts",
        "global_balance_loss": "a key of this launcher",
        "router_z_loss_coef": "a key of this launcher",
        "autoep_size": "works for any MoE model at every ZeRO stage; it need not divide the number of experts",
    }

    size: WholeNumber = 0
    """Expert-parallel degree: the number of ranks that share the experts of each layer, each with about the
    same number. 0 and 1: every rank has all experts."""

    enabled: bool = False
    """Apply `autoep_size`."""

    autoep_size: Count = 1
    """The same as `size`, if `enabled` is true."""

    bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    """After each step, increase the correction bias of a router by this for experts that got less than an
    even share of the tokens, and decrease it for the others (Wang et al. 2024, arXiv:2408.15664): load
    balancing without a loss. The model must have such a bias, as DeepSeek-V3 and GLM-4.5 do. 0: the bias is
    not changed. Also applies if every rank has all experts."""

    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """In training, an expert accepts at most this times an even share of a rank's tokens; beyond that, the
    tokens with the smallest weights are dropped (Lepikhin et al. 2020, arXiv:2006.16668). Null: no token is
    dropped. Also applies if every rank has all experts."""

    dispatch: Literal["pairs", "tokens"] = "pairs"
    """What ranks send each other. "pairs": a token for each of its experts; its sum is in the router's order,
    wherever the experts are. "tokens": a token once for each rank that has some of its experts, which weights their
    outputs and returns one sum, as DeepEP does: faster with many experts per token, but the order of sums, and
    with it their last digits, depend on where the experts are."""

    global_balance_loss: bool = False
    """The model's load-balancing loss counts the tokens of all data-parallel ranks and of the step's
    microbatches so far, instead of each microbatch separately (Qiu et al. 2025, arXiv:2501.11873). The model
    must compute it (`output_router_logits` in its config.json)."""

    router_z_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the router z-loss: the mean square of the log-sum-exp of a router's logits, added to the
    load-balancing loss to keep logits small (Zoph et al. 2022, arXiv:2202.08906)."""

    @property
    def degree(self) -> int:
        """Return the expert-parallel degree, at least 1."""
        named = [self.size] if self.enabled is not True else [self.size, self.autoep_size]
        return max([1, *(size for size in named if isinstance(size, int))])


class CurriculumScheduleConfig(Section):
    """Parameters of the schedule; which ones are required depends on `schedule_type`."""

    total_curriculum_step: Count | None = None
    """fixed_linear, fixed_root: optimizer steps from min_difficulty to max_difficulty."""

    difficulty_step: Count | None = None
    """fixed_linear, fixed_root: lengths are multiples of this; 8 or more suits tensor cores."""

    root_degree: Count | None = None
    """fixed_root: 2 is a square root, which rises quickly at first; 1 is the same as fixed_linear."""

    difficulty: WholeNumbers | None = None
    """fixed_discrete: the lengths, in order."""

    max_step: WholeNumbers | None = None
    """fixed_discrete: the last optimizer step of each length except the final one, which has no end."""


class SeqlenConfig(Section):
    """Curriculum by sequence length, in tokens (Li et al. 2022, arXiv:2108.06084)."""

    difficulty_type: Literal["value", "percentile"] = "value"
    """"value": difficulties are lengths. "percentile" needs DeepSpeed's index files and is refused."""

    clustering_type: Literal["single_cluster", "schedule_based"] = "single_cluster"
    """"single_cluster": all sequences are truncated. "schedule_based" needs DeepSpeed's index files and is
    refused."""

    index_to_sample_path: str | None = None
    """DeepSpeed's file of sequences by difficulty; refused, because sequences are truncated, not selected."""

    index_to_metric_path: str | None = None
    """DeepSpeed's file of difficulties; refused, because sequences are truncated, not selected."""

    min_difficulty: Count | None = None
    """Sequence length at the start, in tokens."""

    max_difficulty: Count | None = None
    """Sequence length at the end, in tokens; longer sequences stay truncated to it."""

    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    """Growth from min to max: linear, by a root, or in steps. "custom" needs a function and is refused."""

    schedule_config: CurriculumScheduleConfig = Field(
        default_factory=CurriculumScheduleConfig.model_construct
    )
    """Parameters of the schedule."""

    def missing(self) -> Iterator[str]:
        """Yield the keys that a curriculum requires and that are not set."""
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
"""Schedule type -> the required keys of its schedule_config."""


class CurriculumMetricsConfig(Section):
    """Metrics of the difficulty of a sequence."""

    seqlen: SeqlenConfig | None = None
    """The length of the sequence."""


class CurriculumLearningConfig(Section):
    """Curriculum learning: easy sequences first."""

    enabled: bool = False
    """Truncate the sequences of a batch to a length that grows with the optimizer steps, in training only."""

    curriculum_metrics: CurriculumMetricsConfig = Field(
        default_factory=CurriculumMetricsConfig.model_construct
    )
    """Metrics by name; only `seqlen` needs no analysis of the data before the run."""

    data_cluster_path: str | None = None
    """DeepSpeed's directory for clusters of sequences."""

    without_effect: ClassVar[dict[str, str]] = {
        "data_cluster_path": "sequences are truncated, not selected, so there are no clusters to write"
    }


class DataSamplingConfig(Section):
    """Selection of the training data."""

    enabled: bool = False
    """Enable this section. False: all of its keys are ignored, including `curriculum_learning`."""

    num_epochs: Count = 1000
    """train_batch() raises an error after this many passes over initialize(training_data=...); recipes refuse
    longer runs."""

    num_workers: WholeNumber = 0
    """Worker processes that load initialize(training_data=...); 0 loads in the rank's own process. Recipes
    read memory maps, in the rank's own process."""

    pin_memory: bool = False
    """Put the batches of initialize(training_data=...) in page-locked memory, from which copies to a GPU are
    asynchronous."""

    curriculum_learning: CurriculumLearningConfig = Field(
        default_factory=CurriculumLearningConfig.model_construct
    )
    """Curriculum learning: easy sequences first."""


class DataEfficiencyConfig(Section):
    """Selection and truncation of training data, to train with less of it (Li et al. 2022,
    arXiv:2212.03597)."""

    enabled: bool = False
    """Enable this section. False: all of its keys are ignored."""

    seed: WholeNumber = 1234
    """Seed for the order of initialize(training_data=...); recipes use their flag --seed."""

    data_sampling: DataSamplingConfig = Field(default_factory=DataSamplingConfig.model_construct)
    """Selection of the training data."""

    differs: ClassVar[dict[str, str]] = {
        "enabled": "false disables the whole section; DeepSpeed reads only the inner `enabled` keys",
        "seed": "sets only the order of initialize(training_data=...); recipes have the flag --seed",
        "data_sampling": "`seqlen` truncates sequences to the current length; DeepSpeed selects sequences "
        "with index files",
    }

    @property
    def sampling(self) -> DataSamplingConfig | None:
        """Return `data_sampling` if it is enabled, else None."""
        return self.data_sampling if self.enabled is True and self.data_sampling.enabled is True else None

    @property
    def curriculum(self) -> SeqlenConfig | None:
        """Return the curriculum if it is enabled, else None."""
        learning = self.sampling.curriculum_learning if self.sampling else None
        return learning.curriculum_metrics.seqlen if learning and learning.enabled is True else None
