"""`Config`: the whole JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from launcher.config.activation import ActivationCheckpointingConfig
from launcher.config.data_types import DataTypesConfig, Dtype
from launcher.config.optimizer import OptimizerConfig
from launcher.config.precision import Bf16Config, Fp16Config
from launcher.config.problems import Note
from launcher.config.reader import Document
from launcher.config.resolve import ResolvedAuto, resolved
from launcher.config.scheduler import SchedulerConfig
from launcher.config.section import Conflict, Count, Remark, Section
from launcher.config.zero import ZeroConfig


def _infinite_is_never(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


class Config(Section):
    """A DeepSpeed JSON. Made by `launcher.config.load`; immutable.

    `resolve` gives a copy without any "auto". `Config.resolved_autos` tells what each became and why;
    `Config.notes` what a person should know though nothing is wrong.
    """

    aliases: ClassVar[dict[str, str]] = {"bfloat16": "bf16"}
    old_names: ClassVar[frozenset[str]] = frozenset({"bfloat16"})

    train_batch_size: Count | None = None
    """Sequences per optimizer step over all ranks; null is found from the other two."""

    train_micro_batch_size_per_gpu: Count | None = None
    """Sequences per rank and forward pass; null is found from the other two."""

    gradient_accumulation_steps: Count | None = None
    """Forward passes per optimizer step; null is found from the other two, else 1."""

    optimizer: OptimizerConfig | None = None
    """The optimizer to build; null: the caller brings one."""

    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule to build; null: the caller brings one, or the rate is constant."""

    fp16: Fp16Config = Field(default_factory=Fp16Config)
    """float16 training."""

    bf16: Bf16Config = Field(default_factory=Bf16Config)
    """bfloat16 training. `bfloat16` is its old name."""

    zero_optimization: ZeroConfig = Field(default_factory=ZeroConfig)
    """ZeRO stage and sizes."""

    activation_checkpointing: ActivationCheckpointingConfig | None = None
    """Present: transformer blocks are checkpointed."""

    data_types: DataTypesConfig = Field(default_factory=DataTypesConfig)
    """Dtypes beside fp16 and bf16."""

    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 never clips. Default 1.0 since DeepSpeed of June 2026, 0 before."""

    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """What the gradients of the data-parallel ranks become: their mean, or their sum (microbatches are averaged)."""

    communication_data_type: Dtype | None = None
    """Dtype in which gradients are reduced; null: the one they have."""

    steps_per_print: Annotated[Count | None, BeforeValidator(_infinite_is_never)] = None
    """Optimizer steps between two printed lines; null or Infinity: DeepSpeed's line is not printed."""

    wall_clock_breakdown: bool = False
    """Time forward, backward and step apart; reductions run inside the backward."""

    dataloader_drop_last: bool = False
    """Drop the last global batch of an epoch when it is short."""

    zero_allow_untested_optimizer: bool = False
    """Take a caller's optimizer that is not of torch.optim; it must work element by element."""

    zero_force_ds_cpu_optimizer: bool = True
    """DeepSpeed refuses other optimizers than its own with offload; without offload it says nothing."""

    _document: Document = PrivateAttr(default_factory=lambda: Document("config", {}))
    _notes: tuple[Note, ...] = PrivateAttr(default=())
    _resolved_autos: tuple[ResolvedAuto, ...] = PrivateAttr(default=())

    def __eq__(self, other: object) -> bool:
        """Same values; where they were written does not matter."""
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    @property
    def notes(self) -> tuple[Note, ...]:
        """Remarks on the values: old names, keys without effect here, surprising defaults."""
        return self._notes

    @property
    def resolved_autos(self) -> tuple[ResolvedAuto, ...]:
        """(path, value, why) of every "auto" and of batch keys that were left out; empty before `resolve`."""
        return self._resolved_autos

    @property
    def dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """Dtype of the model's parameters and gradients."""
        return "fp16" if self.fp16.enabled is True else "bf16" if self.bf16.enabled is True else "fp32"

    def resolve(self, *, dp_degree: int, auto: Mapping[str, Any] = MappingProxyType({})) -> Config:
        """A copy in which the batch equation is solved and no value is "auto".

        Args:
            dp_degree: data-parallel ranks, at least 1.
            auto: dotted path -> value for keys that say "auto", or for batch keys that are left out.
                Values for keys that say something else are not used.

        Raises:
            ConfigError: the batch keys do not fit `dp_degree`, or an "auto" has no value.
        """
        return resolved(self, dp_degree, auto)

    differs: ClassVar[dict[str, str]] = {
        "gradient_allreduce_op": '"sum" works at every stage; DeepSpeed refuses it at stage 3',
    }

    def conflicts(self) -> Iterator[Conflict]:
        yield from self._needs_norm()
        if self.fp16.enabled is True and self.bf16.enabled is True:
            yield Conflict(
                ("fp16.enabled", "bf16.enabled"),
                "fp16.enabled and bf16.enabled are both true, and parameters have one dtype",
                "set one of fp16.enabled and bf16.enabled to false",
            )

    def _needs_norm(self) -> Iterator[Conflict]:
        if self.zero_optimization.compute_grad_norm is not False:
            return
        users = {
            "gradient_clipping": self.gradient_clipping != 0,
            "fp16.enabled": self.fp16.enabled is True,
            "bf16.check_grad_overflow": self.bf16.enabled is True and self.bf16.check_grad_overflow is True,
        }
        for key in [key for key, on in users.items() if on]:
            ways = {"gradient_clipping": "0"}
            yield Conflict(
                ("zero_optimization.compute_grad_norm", key),
                f"zero_optimization.compute_grad_norm is false, and {key} needs the norm",
                f"set {key} to {ways.get(key, 'false')}, or compute_grad_norm to true",
            )

    def remarks(self) -> Iterator[Remark]:
        if "gradient_clipping" not in self.model_fields_set:
            what = "is left out: the norm is clipped to 1.0, as in DeepSpeed since June 2026"
            yield Remark("gradient_clipping", what)
