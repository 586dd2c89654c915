"""Smaller methods and attributes of DeepSpeed's engine that scripts use, implemented with this engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from launcher.errors import ConfigError
from launcher.models.units import SPREAD_OVER

if TYPE_CHECKING:
    from launcher.engine.engine import Engine
    from launcher.pipeline.sequential.grid import PipelineParallelGrid


class DeepSpeedMethods:
    """The part of an Engine with DeepSpeed's smaller methods."""

    dont_change_device = False
    mpu: Any = None
    gradient_average = True

    def _engine(self) -> Engine:
        return cast("Engine", self)

    @cached_property
    def grid(self) -> PipelineParallelGrid:
        """Return this rank's coordinates along pp, dp and tp. In DeepSpeed only pipeline engines have it."""
        from launcher.pipeline.sequential.grid import PipelineParallelGrid

        return PipelineParallelGrid(mesh=self._engine().mesh)

    @property
    def has_moe_layers(self) -> bool:
        """Return whether the script has built MoE layers."""
        return bool(self.num_experts)

    @property
    def num_experts(self) -> list[int]:
        """Return the number of experts of each MoE layer."""
        from launcher.experts.modules import number_of

        return [number_of(each) for each in self._engine().module.modules() if hasattr(each, SPREAD_OVER)]

    @property
    def sequence_parallel_size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self._engine().mesh.axes["cp"].degree

    @property
    def seq_parallel_group(self) -> Any:
        """Return the group of ranks that share this rank's sequences; None without sequence parallelism."""
        return self._engine().mesh.axes["cp"].group

    @property
    def seq_dp_world_size(self) -> int:
        """Return the number of ranks over which gradients are averaged."""
        return self._engine().mesh.dp_cp.degree

    @property
    def seq_data_parallel_group(self) -> Any:
        from launcher.comm.groups import or_alone

        return or_alone(self._engine().mesh.dp_cp.group)

    @property
    def pipeline_parallelism(self) -> bool:
        return self._engine().num_stages > 1

    @property
    def inside_no_sync_ctxt(self) -> bool:
        return not self._engine()._syncs

    def is_first_weights_partition_group(self) -> bool:
        """Return whether parameters are sharded, and this rank is in the first group with all shards."""
        zero = self._engine().zero
        return zero.policy.shard_params and zero.axes.replicate.rank == 0

    @property
    def communication_data_type(self) -> torch.dtype:
        """Return the dtype in which gradients are reduced: as configured, or else the parameters' dtype."""
        policy = self._engine().zero.policy
        return policy.comm_dtype or policy.param_dtype

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        raise ConfigError(
            "the dtype of gradient communication is fixed when the engine is created",
            where="engine.communication_data_type",
            fix="set communication_data_type in the JSON",
        )

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer is offloaded to host memory."""
        section = self._engine().resolved.zero_optimization.offload_optimizer
        return section is not None and section.device == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        section = self._engine().resolved.zero_optimization.offload_optimizer
        return section is not None and section.device == "nvme"

    def get_data_types(self) -> tuple[Any, Any]:
        """Return the dtypes of the parameters and of the accumulated gradients."""
        policy = self._engine().zero.policy
        return policy.param_dtype, policy.grad_dtype

    def clip_fp32_gradients(self) -> None:
        """Do nothing: step() clips the gradients to `gradient_clipping`."""

    def get_sequence_parallel_group(self) -> Any:
        return self.seq_parallel_group

    def is_map_style_dataset(self, obj: Any) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        return isinstance(obj, IterableDataset)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro batch size; the accumulation steps stay, and the global batch size changes.
        Existing dataloaders are not affected."""
        engine = self._engine()
        if (
            isinstance(micro_batch_size, bool)
            or not isinstance(micro_batch_size, int)
            or micro_batch_size < 1
        ):
            raise ConfigError(
                f"set_train_micro_batch_size({micro_batch_size!r})", fix="use an integer of at least 1"
            )
        train = micro_batch_size * engine.gradient_accumulation_steps() * engine.dp_world_size
        sizes = {"train_micro_batch_size_per_gpu": micro_batch_size, "train_batch_size": train}
        engine._config = engine._config.model_copy(update=sizes)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a dataloader that shards a dataset over the data-parallel ranks.

        Args:
            batch_size: the batch size per rank; default: the micro batch size.
            route: "train" shuffles; "eval" and "predict" keep the order of the dataset.
            data_sampler: replaces the default sampler.
        """
        from launcher.engine.loaders import loader_of, share_of

        engine = self._engine()
        dp = engine.mesh.dp
        return loader_of(
            dataset,
            batch_size or engine.train_micro_batch_size_per_gpu(),
            data_sampler or share_of(dataset, dp.degree, dp.rank, shuffle=route == "train"),
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory and engine.device.type == "cuda",
            drop_last=bool(engine.resolved.dataloader_drop_last),
        )

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return this rank's state dict of the model, in the dtype of the parameters.

        Raises:
            ConfigError: at stage 3, because no rank has the unsharded parameters.
        """
        engine = self._engine()
        if engine.zero_optimization_partition_weights():
            raise ConfigError(
                "module_state_dict() returns full parameters, but stage 3 shards them",
                where="zero_optimization.stage",
                fix="call engine._zero3_consolidated_16bit_state_dict() on every rank, or save_16bit_model()",
            )
        found = engine.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            frozen = {
                f"{prefix}{name}" for name, p in engine.module.named_parameters() if not p.requires_grad
            }
            found = {name: value for name, value in found.items() if name not in frozen}
        if destination is not None:
            destination.update(found)
            return cast(dict[str, Tensor], destination)
        return dict(found)

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load the weights of the model, and the optimizer's master weights, at every stage. Collective; uses
        the values of rank 0. Every rank temporarily holds the unsharded model.

        Args:
            checkpoint: {"module": a state dict of the model}.
            strict: missing or unexpected names are an error.
            custom_load_fn: called instead of load_state_dict(), with src=the state dict, dst=the model.
            fetch_z3_params, z3_params_to_fetch: ignored, because all parameters are gathered.
            allowed_missing_keys: names that may be missing even if `strict` is true.

        Raises:
            RuntimeError: names are missing or unexpected, or a shape differs.
        """
        from launcher.zero.features.context import GatheredParameters

        module = self._engine().module
        with GatheredParameters(list(module.parameters()), modifier_rank=0):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=module)
                return
            found = module.load_state_dict(
                checkpoint["module"], strict=strict and allowed_missing_keys is None
            )
        missing = set(found.missing_keys) - set(allowed_missing_keys or ())
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(
                f"load_module_state_dict(): missing keys {sorted(missing)}, unexpected keys "
                f"{sorted(found.unexpected_keys)}"
            )
