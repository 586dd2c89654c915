"""`Config`, the whole JSON, and `load`, which builds it from a path, JSON text or a mapping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from launcher.config import ranks as ranks_of
from launcher.config.check import Examined, examine
from launcher.config.conversions import convert
from launcher.config.document import Document
from launcher.config.elasticity import ElasticityConfig
from launcher.config.fault_tolerance import CheckpointConfig, FaultToleranceConfig, ReplicaCheckConfig
from launcher.config.monitor import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    MlflowConfig,
    PrometheusConfig,
    TensorboardConfig,
    TimersConfig,
    TrackioConfig,
    WandbConfig,
)
from launcher.config.offload import AioConfig
from launcher.config.optimizer import OptimizerConfig
from launcher.config.parallelism import ContextParallelConfig, PipelineConfig, TensorParallelConfig
from launcher.config.precision import Bf16Config, DataTypesConfig, Fp8Config, Fp16Config, TorchAutocastConfig
from launcher.config.problems import Note
from launcher.config.resolve import ResolvedAuto, resolved
from launcher.config.scheduler import SchedulerConfig
from launcher.config.section import Count, Dtype, Section, lower
from launcher.config.small_sections import (
    ActivationCheckpointingConfig,
    CompileConfig,
    DataEfficiencyConfig,
    ExpertParallelConfig,
)
from launcher.config.source import file_of, read
from launcher.config.zero import ZeroConfig


def _infinite_is_never(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


class Config(Section):
    """A DeepSpeed JSON. Created by `launcher.config.load`; immutable.

    `resolve` returns a copy without any "auto". `Config.resolved_autos` lists the value of each "auto" and
    where it came from; `Config.notes` lists remarks that are not errors.
    """

    without_effect: ClassVar[dict[str, str]] = {
        "zero_force_ds_cpu_optimizer": "every elementwise optimizer can update offloaded state",
        "vocabulary_size": "the vocabulary size is that of the model; DeepSpeed only warns about sizes that "
        "are not multiples of 8",
        "seq_parallel_communication_data_type": "gradients are reduced over context-parallel and data-parallel ranks "
        "together, in communication_data_type",
    }
    differs: ClassVar[dict[str, str]] = {
        "gradient_predivide_factor": "applies at every stage, also with reduce_scatter",
        "prescale_gradients": "applies at every stage, also with reduce_scatter",
        "sequence_parallel_size": "all ranks of a context-parallel group get the same full batch, and the loss equals "
        "that of one process; samplers must use engine.mesh.dp",
        "gradient_allreduce_op": '"sum" works at every stage; DeepSpeed rejects it at stage 3',
    }

    train_batch_size: Count | None = None
    """Sequences per optimizer step over all ranks. Null: computed from the other two batch keys."""

    train_micro_batch_size_per_gpu: Count | None = None
    """Sequences per rank and forward pass. Null: computed from the other two batch keys."""

    gradient_accumulation_steps: Count | None = None
    """Forward passes per optimizer step. Null: computed from the other two batch keys, else 1."""

    optimizer: OptimizerConfig | None = None
    """The optimizer to build. Null: the caller provides one."""

    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build. Null: the caller provides one, or the rate is constant."""

    fp16: Fp16Config = Field(default_factory=Fp16Config.model_construct)
    """float16 training."""

    bf16: Bf16Config = Field(default_factory=Bf16Config.model_construct)
    """bfloat16 training."""

    fp8: Fp8Config = Field(default_factory=Fp8Config.model_construct)
    """float8 products."""

    torch_autocast: TorchAutocastConfig = Field(default_factory=TorchAutocastConfig.model_construct)
    """float32 model with the forward under torch.autocast."""

    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig.model_construct)
    """ZeRO stage and options."""

    tensor_parallel: TensorParallelConfig = Field(default_factory=TensorParallelConfig.model_construct)
    """Tensor parallelism."""

    sequence_parallel_size: Count = 1
    """Number of ranks that share the tokens of each sequence; `context_parallel` sets the method."""

    context_parallel: ContextParallelConfig = Field(default_factory=ContextParallelConfig.model_construct)
    """Context parallelism: how ranks share the tokens of each sequence."""

    expert_parallel: ExpertParallelConfig = Field(default_factory=ExpertParallelConfig.model_construct)
    """Expert parallelism."""

    tiled_loss: bool | None = None
    """True: the LM head and the loss of a causal LM are computed for a tile of tokens at a time, and
    recomputed in backward, so that no rank holds all logits. Null: enabled where ranks share sequences, if
    the model supports it and the script does not slice the sequences itself."""

    tiled_mlp: bool = False
    """The MLP of each block is computed for a tile of tokens at a time, and recomputed in backward."""

    pipeline: PipelineConfig = Field(default_factory=PipelineConfig.model_construct)
    """Pipeline parallelism."""

    aio: AioConfig = Field(default_factory=AioConfig.model_construct)
    """Asynchronous I/O of NVMe offload; without effect if nothing is offloaded to NVMe."""

    activation_checkpointing: ActivationCheckpointingConfig | None = None
    """If present, transformer blocks are checkpointed."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig.model_construct)
    """How checkpoints are written."""

    replica_check: ReplicaCheckConfig = Field(default_factory=ReplicaCheckConfig.model_construct)
    """Consistency checks of replicated state."""

    fault_tolerance: FaultToleranceConfig = Field(default_factory=FaultToleranceConfig.model_construct)
    """Replicas that continue training when one of them fails."""

    compile: CompileConfig = Field(default_factory=CompileConfig.model_construct)
    """torch.compile of the blocks."""

    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig.model_construct)
    """Dtypes other than those set by fp16 and bf16."""

    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Maximum global gradient norm; 0 disables clipping. DeepSpeed's default: 1.0 since June 2026, 0
    before."""

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lower)] = "mean"
    """Reduction of gradients over the data-parallel ranks: mean or sum (microbatches are averaged)."""

    loss_normalization: Annotated[Literal["microbatches", "tokens"], BeforeValidator(lower)] = "microbatches"
    """Weighting of the losses that `train_batch` averages: "microbatches" gives every microbatch of every
    rank the same weight, "tokens" every token of the step that contributes to the loss. Recipes always use
    "tokens"."""

    communication_data_type: Dtype | None = None
    """Dtype in which gradients are reduced. Null: the dtype of the gradients."""

    seq_parallel_communication_data_type: Dtype | None = "fp32"
    """Dtype in which gradients are reduced over ranks that share a sequence."""

    prescale_gradients: bool = False
    """Divide gradients by the number of ranks before the reduction instead of after it: the sum of 16-bit
    gradients cannot overflow then, but small ones may underflow."""

    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    """Factor by which gradients are divided before the reduction; the rest of the division by the number of
    ranks is done after it. Ignored with `prescale_gradients`."""

    steps_per_print: Annotated[Count | None, BeforeValidator(_infinite_is_never)] = None
    """Optimizer steps between two log lines. Null or Infinity: DeepSpeed's line is not printed."""

    wall_clock_breakdown: bool = False
    """Time the forward, the backward, the wait for reductions within the backward, and the step. Milliseconds
    per optimizer step are printed every `steps_per_print` steps (10 if that is null); recipes also write them
    to metrics.jsonl. On GPUs, every phase then synchronizes with the device."""

    memory_breakdown: bool = False
    """Print the memory of rank 0 after each phase, every `steps_per_print` steps (10 if that is null):
    allocated and peak memory on GPUs, the resident set on CPUs, and how much of it ZeRO holds."""

    tensorboard: TensorboardConfig = Field(default_factory=TensorboardConfig.model_construct)
    """TensorBoard files."""

    csv_monitor: CsvMonitorConfig = Field(default_factory=CsvMonitorConfig.model_construct)
    """CSV files."""

    wandb: WandbConfig = Field(default_factory=WandbConfig.model_construct)
    """Weights & Biases."""

    comet: CometConfig = Field(default_factory=CometConfig.model_construct)
    """Comet."""

    mlflow: MlflowConfig = Field(default_factory=MlflowConfig.model_construct)
    """MLflow."""

    trackio: TrackioConfig = Field(default_factory=TrackioConfig.model_construct)
    """trackio."""

    prometheus: PrometheusConfig = Field(default_factory=PrometheusConfig.model_construct)
    """Metrics file for Prometheus."""

    flops_profiler: FlopsProfilerConfig = Field(default_factory=FlopsProfilerConfig.model_construct)
    """Report of the floating-point operations and the time of one step."""

    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig.model_construct)
    """Log of collectives."""

    dataloader_drop_last: bool = False
    """Drop the last global batch of an epoch if it is incomplete."""

    data_efficiency: DataEfficiencyConfig = Field(default_factory=DataEfficiencyConfig.model_construct)
    """Curriculum learning by sequence length."""

    elasticity: ElasticityConfig = Field(default_factory=ElasticityConfig.model_construct)
    """Batch sizes that work for many world sizes."""

    managed_gradient_accumulation: bool = True
    """The engine counts microbatches and steps after every gradient_accumulation_steps of them. False: every
    engine.step() is an optimizer step, after any number of backward calls; each loss is still divided by
    gradient_accumulation_steps, unless backward(scale_wrt_gas=False) is called."""

    timers: TimersConfig = Field(default_factory=TimersConfig.model_construct)
    """Throughput logging."""

    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    """Log level of the engine; the lines of `steps_per_print` have level "info". Null: the level that the
    program has set for the logger "launcher"."""

    dump_state: bool = False
    """Print a description of the engine, once, on rank 0."""

    disable_python_gc: bool = False
    """Disable Python's cyclic garbage collector from initialize() to engine.destroy(). The recipes collect
    before evaluations and checkpoints; a custom training loop calls engine.collect_python_gc()."""

    vocabulary_size: Count | None = None
    """DeepSpeed warns about a size that is not a multiple of 8."""

    zero_allow_untested_optimizer: bool = False
    """Accept a caller's optimizer that is not from torch.optim; it must be elementwise."""

    zero_force_ds_cpu_optimizer: bool = True
    """DeepSpeed accepts only its own optimizers with offload; without offload, the key has no effect."""

    _document: Document = PrivateAttr(default_factory=lambda: Document("config", {}))
    _notes: tuple[Note, ...] = PrivateAttr(default=())
    _resolved_autos: tuple[ResolvedAuto, ...] = PrivateAttr(default=())

    def __eq__(self, other: object) -> bool:
        """Compare the values, regardless of where they were written."""
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    @property
    def notes(self) -> tuple[Note, ...]:
        """Return the remarks on the values: obsolete names, keys without effect, surprising defaults."""
        return self._notes

    def where(self, path: str) -> str:
        """Return `file:line:column` of a dotted key."""
        return self._document.where(tuple(path.split(".")))

    @property
    def resolved_autos(self) -> tuple[ResolvedAuto, ...]:
        """Return (path, value, why) of every "auto" and every batch key that is not set; empty before
        `resolve`."""
        return self._resolved_autos

    @property
    def dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """Return the dtype of the model's parameters and gradients."""
        return "fp16" if self.fp16.enabled is True else "bf16" if self.bf16.enabled is True else "fp32"

    @property
    def cp_degree(self) -> int:
        """Return how many ranks share a sequence, at least 1."""
        size = 1 if isinstance(self.sequence_parallel_size, str) else self.sequence_parallel_size
        ulysses, ring = self.context_parallel.sizes
        return max(size, max(1, ulysses) * max(1, ring))

    def dp_degree(self, ranks: int) -> int:
        """Return the data-parallel degree for a run with `ranks` ranks.

        The number of ranks is stages x data-parallel x context-parallel x tensor-parallel degree.

        Raises:
            ConfigError: the degrees do not divide the number of ranks.
        """
        return ranks_of.dp_degree(self, ranks)

    def with_stages(self, stages: int) -> Config:
        """Return a copy with `stages` pipeline stages, for a model that sets their number itself.

        Raises:
            ConfigError: the JSON sets a different number.
        """
        return ranks_of.with_stages(self, stages)

    def resolve(self, *, dp_degree: int, auto: Mapping[str, Any] = MappingProxyType({})) -> Config:
        """Return a copy in which the batch equation is solved and no value is "auto".

        Args:
            dp_degree: data-parallel ranks, at least 1.
            auto: dotted path -> value for keys that are "auto", or for batch keys that are not set. Values
                for other keys are ignored.

        Raises:
            ConfigError: the batch keys do not fit `dp_degree`, or an "auto" has no value.
        """
        return resolved(self, dp_degree, auto)


def load(source: str | Path | Mapping[str, Any], *, where: str | None = None) -> Config:
    """Read and check a configuration.

    Args:
        source: path of a JSON file or of an accelerate YAML file, JSON text (it starts with `{`), JSON text
            in base64, or a mapping. Hjson is accepted: comments, missing or extra commas, unquoted strings.
        where: name to use in messages instead of the path.

    Raises:
        ConfigError: the file is missing or not JSON. ConfigProblems, a ConfigError, lists every unknown key,
            wrong value and contradiction at once, each with file:line:column and path.
    """
    return inspect(source, where=where).required()


def inspect(source: str | Path | Mapping[str, Any] | Document, *, where: str | None = None) -> Examined:
    """Return what `load` finds in a configuration, for `launch check`. Raises ConfigError for invalid
    JSON."""
    written = source if isinstance(source, Document) else read(source, where)
    examined = examine(Config, convert(written))
    if (
        examined.problems
        and where is None
        and isinstance(source, Mapping)
        and (file := file_of(written.tree)) is not None
    ):
        examined = examine(Config, convert(replace(written, name=file.name, places=file.places)))
    if examined.config is not None:
        examined.config._document, examined.config._notes = examined.document, examined.notes
    return examined
