"""Getters of an engine: DeepSpeed's, and a few additional ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from launcher.comm import Mesh
from launcher.config import Config
from launcher.engine.config_getters import ConfigGetters
from launcher.engine.curriculum import Curriculum
from launcher.engine.telemetry import Telemetry
from launcher.monitor.throughput import Throughput
from launcher.monitor.timers import Timers
from launcher.optim.loss_scale import LossScale
from launcher.optim.sharded import ShardedOptimizer
from launcher.zero import ZeroModel

if TYPE_CHECKING:
    from launcher.zero.features.versions import Versions


class ModuleHolder(nn.Module):
    """A module that wraps another one, `module`, and forwards unknown attributes to it."""

    explain: ClassVar[Callable[[str], AttributeError] | None] = None
    """Creates the error for a name that neither module has; set by code that adds names to this class."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            module = super().__getattr__("module")
            explain = type(self).explain
            if explain is None or hasattr(module, name):
                return getattr(module, name)
            raise explain(name) from None


class EngineGetters(ConfigGetters):
    """Getters without side effects; `config_getters.py` has those that only read the config."""

    zero: ZeroModel
    mesh: Mesh
    optimizer: ShardedOptimizer | None
    versions: Versions | None
    loss_scaler: LossScale
    curriculum: Curriculum
    global_steps: int
    timers: Timers
    telemetry: Telemetry
    _config: Config
    _norm: float | None
    _applied: bool

    def was_step_applied(self) -> bool:
        """Return False after a skipped step (overflow) and between boundaries."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last gradient before clipping, the same at every stage; None if
        `compute_grad_norm` is false."""
        return self._norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_mom(self) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_type(self) -> list[str]:
        return (
            [type(self.optimizer.inner).__name__] * len(self.optimizer.param_groups) if self.optimizer else []
        )

    def loss_scale(self) -> float:
        return self.loss_scaler.scale

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train batch size, micro batch size per rank, accumulation steps)."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def train_batch_size(self) -> int:
        return _whole(self._config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        return _whole(self._config.train_micro_batch_size_per_gpu)

    def managed_gradient_accumulation(self) -> bool:
        """Return `managed_gradient_accumulation` of the resolved config; read at every microbatch."""
        return self._config.managed_gradient_accumulation

    def gradient_accumulation_steps(self) -> int:
        return _whole(self._config.gradient_accumulation_steps)

    def steps_per_print(self) -> int | None:
        every = self._config.steps_per_print
        return None if every is None else _whole(every)

    def curriculum_seqlen(self) -> int | None:
        """Return the sequence length of the next optimizer step; None without a curriculum."""
        return self.curriculum.seqlen(self.global_steps)

    def wall_clock_breakdown(self) -> bool:
        """Return whether phases are timed, which `flops_profiler` also requires."""
        return self.timers.enabled

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the milliseconds of forward, backward, reduce and step in the last step; {} if disabled."""
        return dict(self.timers.last_step)

    @property
    def tput_timer(self) -> Throughput:
        """Return the throughput timer, active if `timers.throughput` and `steps_per_print` are enabled."""
        return self.telemetry.throughput

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Return the weights with sparse gradients: always empty, even with `sparse_gradients`."""
        return set()

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    @property
    def config(self) -> dict[str, Any]:
        """Return the resolved config as a plain dict."""
        return self._config.to_dict()

    @property
    def resolved(self) -> Config:
        """Return the resolved config as a `Config`."""
        return self._config

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def dp_world_size(self) -> int:
        return self.mesh.dp.degree

    @property
    def mp_world_size(self) -> int:
        return self.mesh.axes["tp"].degree

    def get_data_parallel_rank(self) -> int:
        return self.mesh.dp.rank

    def get_tensor_parallel_rank(self) -> int:
        return self.mesh.axes["tp"].rank

    get_model_parallel_rank = get_tensor_parallel_rank

    def get_pipeline_parallel_rank(self) -> int:
        return self.mesh.axes["pp"].rank

    def optimizer_name(self) -> str | None:
        """Return the class name of the optimizer."""
        return type(self.optimizer.inner).__name__ if self.optimizer else None

    @property
    def data_parallel_group(self) -> Any:
        return self.mesh.dp.group

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group, until the scheduler sets it again."""
        for group in self.optimizer.param_groups if self.optimizer else []:
            group["lr"] = lr

    @property
    def lr(self) -> float:
        """Return the learning rate of the first param group."""
        return self.get_lr()[0]

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes held by this rank: parameters (including older versions), master weights,
        gradients and optimizer state."""
        held = {**self.zero.held_bytes(), "optimizer": self.optimizer.held_bytes() if self.optimizer else 0}
        if self.versions is not None:
            held["parameters"] += self.versions.held_bytes
        return held


def _whole(value: Any) -> int:
    assert isinstance(value, int), "the config was resolved"
    return value
