"""The ZeRO policy: what a stage shards, and the sizes that control communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from launcher.errors import ConfigError

# stage: (parameters sharded, gradients sharded, optimizer state sharded); ZeRO paper, arXiv 1910.02054, section 5
STAGES = {0: (False, False, False), 1: (False, False, True), 2: (False, True, True), 3: (True, True, True)}


@dataclass(frozen=True)
class ZeroPolicy:
    """What is sharded, in which dtypes, and how much may be in flight. All sizes are in elements.

    Args:
        shard_params: parameters are gathered before use and freed after it.
        shard_grads: gradients are reduce-scattered as a unit's backward ends, in every microbatch.
        shard_optim: each rank steps only its slice.
        param_dtype: the compute dtype of the module.
        special_dtypes: parameter name -> a different dtype for it. The gradients of these are accumulated in
            fp32.
        fp32_master: 16-bit parameters have fp32 master weights; false: the optimizer steps the parameters
            themselves.
        grad_dtype: dtype of gradients between microbatches (`data_types.grad_accum_dtype`).
        comm_dtype: dtype of gradients in collectives (`communication_data_type`); None: that of the
            parameters, or the dtype of local accumulation.
        predivide: divisor of the gradients before they are reduced (`gradient_predivide_factor`); None: the
            number of ranks (`prescale_gradients`). The step applies the rest of the division.
        reduce_bucket_size: maximum elements of gradients in reduction at once, and of a single collective.
        reduce_scatter: false: at stages 1 to 3 gradients are all-reduced, and each rank keeps its slice.
        allgather_bucket_size: maximum elements of one collective that all-gathers updated parameters.
        allgather_partitions: false: updated parameters are broadcast from each rank instead.
        overlap_comm: overlap reductions with the backward, and prefetch the next units.
        prefetch_bucket_size: elements to gather ahead of use (`stage3_prefetch_bucket_size`).
        max_live_parameters: maximum elements gathered at once (`stage3_max_live_parameters`); the unit in use
            is always gathered.
        max_reuse_distance: keep a unit gathered if it is used again within this many elements.
        persistence_threshold: parameters smaller than this are never sharded.
        model_persistence_threshold: maximum total elements of parameters that are not sharded because they
            are small.
        quantized_weights: gather parameters in blocks of 8-bit integers (`zero_quantized_weights`).
        quantized_gradients: reduce-scatter gradients in blocks of 4-bit integers
            (`zero_quantized_gradients`).
        quantized_frozen: store the shards of frozen parameters in blocks of 8-bit integers.
        float8: parameter name -> the float8 dtype in which it is gathered, because its layer casts it anyway.
        compute_norm: compute the gradient norm in each step.
        apply_gathers: `Module.apply` reads and modifies full parameters (`override_module_apply`).
        warn_of_order: log a warning when the order of use changes (`log_trace_cache_warnings`).
        checks: compare the ranks' collectives, parameters and gradients in each step
            (`enable_sanity_checks`).
    """

    shard_params: bool = False
    shard_grads: bool = False
    shard_optim: bool = False
    param_dtype: torch.dtype = torch.float32
    special_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    fp32_master: bool = True
    grad_dtype: torch.dtype = torch.float32
    comm_dtype: torch.dtype | None = None
    predivide: float | None = 1.0
    reduce_bucket_size: int = 500_000_000
    reduce_scatter: bool = True
    allgather_bucket_size: int = 500_000_000
    allgather_partitions: bool = True
    overlap_comm: bool = True
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    persistence_threshold: int = 100_000
    model_persistence_threshold: int = 2**63 - 1
    quantized_weights: bool = False
    quantized_gradients: bool = False
    quantized_frozen: bool = False
    float8: Mapping[str, torch.dtype] = field(default_factory=dict)
    compute_norm: bool = True
    apply_gathers: bool = True
    warn_of_order: bool = False
    checks: bool = False

    @classmethod
    def of_stage(cls, stage: int, **sizes: object) -> ZeroPolicy:
        """Return the policy of DeepSpeed's `zero_optimization.stage`.

        Raises:
            ConfigError: the stage does not exist.
        """
        if stage not in STAGES:
            raise ConfigError(
                f"unknown ZeRO stage {stage}", where="zero_optimization.stage", fix="use 0, 1, 2 or 3"
            )
        params, grads, optim = STAGES[stage]
        return cls(shard_params=params, shard_grads=grads, shard_optim=optim, **sizes)  # type: ignore[arg-type]
