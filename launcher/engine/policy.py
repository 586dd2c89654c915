"""Translation of the config to a `ZeroPolicy`, one line per field, and to the axes along which it shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from launcher.comm import Mesh
from launcher.config import Config
from launcher.engine.dtypes import DTYPES, special_dtypes
from launcher.zero import ShardAxes, ZeroPolicy
from launcher.zero.axes import shard_axes


def _dtype_or_none(name: str | None) -> torch.dtype | None:
    return DTYPES[name] if name else None


def _has_fp32_master(config: Config) -> bool:
    low = {
        "fp16": config.fp16.fp16_master_weights_and_grads,
        "bf16": config.bf16.bf16_master_weights_and_grads,
    }
    return not low.get(config.dtype)


FIELDS: dict[str, Callable[[Config], Any]] = {
    "param_dtype": lambda c: DTYPES[c.dtype],
    "fp32_master": _has_fp32_master,
    "grad_dtype": lambda c: DTYPES[c.data_types.grad_accum_dtype or c.dtype],
    "comm_dtype": lambda c: _dtype_or_none(c.communication_data_type),
    "predivide": lambda c: None if c.prescale_gradients else c.gradient_predivide_factor,
    "reduce_bucket_size": lambda c: c.zero_optimization.reduce_bucket_size,
    "reduce_scatter": lambda c: c.zero_optimization.reduce_scatter,
    "allgather_bucket_size": lambda c: c.zero_optimization.allgather_bucket_size,
    "allgather_partitions": lambda c: c.zero_optimization.allgather_partitions,
    "overlap_comm": lambda c: c.zero_optimization.overlap_comm,
    "prefetch_bucket_size": lambda c: c.zero_optimization.stage3_prefetch_bucket_size,
    "max_live_parameters": lambda c: c.zero_optimization.stage3_max_live_parameters,
    "max_reuse_distance": lambda c: c.zero_optimization.stage3_max_reuse_distance,
    "persistence_threshold": lambda c: c.zero_optimization.stage3_param_persistence_threshold,
    "model_persistence_threshold": lambda c: c.zero_optimization.stage3_model_persistence_threshold,
    "quantized_weights": lambda c: c.zero_optimization.zero_quantized_weights,
    "quantized_gradients": lambda c: c.zero_optimization.zero_quantized_gradients,
    "quantized_frozen": lambda c: c.zero_optimization.zero_quantized_nontrainable_weights,
    "compute_norm": lambda c: c.zero_optimization.compute_grad_norm and not c.pipeline.updates_inside,
    "apply_gathers": lambda c: c.zero_optimization.override_module_apply,
    "warn_of_order": lambda c: c.zero_optimization.log_trace_cache_warnings,
    "checks": lambda c: c.zero_optimization.enable_sanity_checks,
}
"""Field of `ZeroPolicy` -> its value. The stage sets three more: `launcher.zero.policy.STAGES`."""


def policy_of(config: Config, model: nn.Module) -> ZeroPolicy:
    """Return the policy of a resolved config for a model, including the dtypes of special parameters."""
    values = {name: value(config) for name, value in FIELDS.items()}
    special = special_dtypes(config, model)
    stage = int(config.zero_optimization.stage)
    return ZeroPolicy.of_stage(stage, **values, special_dtypes=special, float8=_sent_in_float8(config, model))


def _sent_in_float8(config: Config, model: nn.Module) -> dict[str, torch.dtype]:
    if not (config.fp8.enabled and config.fp8.all_gather):
        return {}
    from launcher.models.float8 import cast_weights

    return cast_weights(model)


def axes_of(config: Config, mesh: Mesh) -> ShardAxes:
    """Return the shard axes within dp for the configured group sizes. Every rank must call it."""
    zero = config.zero_optimization
    return shard_axes(
        mesh,
        mics_shard_size=zero.mics_shard_size,
        mics_hierarchical=zero.mics_hierarchical_params_gather,
        hpz_size=zero.zero_hpz_partition_size,
    )
