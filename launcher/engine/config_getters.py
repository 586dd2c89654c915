"""The engine's methods that only return config values: DeepSpeed's method names and their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.config import Config

_ZERO = {
    **{
        name: name
        for name in (
            "allgather_bucket_size",
            "allgather_partitions",
            "compute_grad_norm",
            "contiguous_gradients",
            "elastic_checkpoint",
            "ignore_unused_parameters",
            "load_from_fp32_weights",
            "log_trace_cache_warnings",
            "offload_optimizer",
            "offload_param",
            "overlap_comm",
            "parameter_alignment",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "save_muon_momentum_buffer_in_memory",
            "sub_group_size",
        )
    },
    **{
        name: f"stage3_{name}"
        for name in (
            "allgather_sequential",
            "max_live_parameters",
            "max_reuse_distance",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "param_persistence_threshold",
            "prefetch_bucket_size",
        )
    },
    **{
        name: f"zero_{name}"
        for name in (
            "hpz_partition_size",
            "quantized_gradients",
            "quantized_nontrainable_weights",
            "quantized_weights",
        )
    },
    "multi_rank_bucket_allreduce": "use_multi_rank_bucket_allreduce",
}

KEYS: dict[str, str] = {
    **{f"zero_{name}": f"zero_optimization.{key}" for name, key in _ZERO.items()},
    **{
        f"flops_profiler_{name}": f"flops_profiler.{name}"
        for name in (
            "detailed",
            "enabled",
            "module_depth",
            "output_file",
            "recompute_fwd_factor",
            "top_modules",
        )
    },
    **{
        name: name
        for name in (
            "dataloader_drop_last",
            "dump_state",
            "gradient_clipping",
            "gradient_predivide_factor",
            "log_level",
            "memory_breakdown",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        )
    },
    "aio_config": "aio",
    "autotp_size": "tensor_parallel.autotp_size",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "bfloat16_enabled": "bf16.enabled",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "data_efficiency_config": "data_efficiency",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "tensor_parallel_config": "tensor_parallel",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_optimization_stage": "zero_optimization.stage",
}
"""Method -> key path in the resolved config. A section is returned as a dict, a missing one as None."""


class ConfigGetters:
    """The part of an engine with a getter for each of `KEYS`."""

    _config: Config

    fp16_enabled: Callable[[], bool]
    bfloat16_enabled: Callable[[], bool]
    zero_optimization_stage: Callable[[], int]

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether a program saves whole weights by itself: by the key of stage 3; always with tensor
        parallelism, for which accelerate and the Trainer would otherwise write files without weights."""
        split = self._config.tensor_parallel.degree > 1
        return split or self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def dynamic_loss_scale(self) -> bool:
        return self._config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return float(2**self._config.fp16.initial_scale_power)

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.checkpoint.tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._config.checkpoint.tag_validation == "Fail"


def value_at(config: Any, path: str) -> Any:
    """Return the value at a key path as plain data, or None if a section along the path is missing."""
    for key in path.split("."):
        config = getattr(config, key, None)
    return config.to_dict() if hasattr(config, "to_dict") else config


def _getter(path: str) -> Callable[[ConfigGetters], Any]:
    def get(self: ConfigGetters) -> Any:
        return value_at(self._config, path)

    get.__doc__ = f"`{path}` of the resolved JSON."
    return get


for _name, _path in KEYS.items():
    setattr(ConfigGetters, _name, _getter(_path))
