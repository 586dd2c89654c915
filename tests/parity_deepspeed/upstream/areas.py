"""Which of their directories are run, and which of their tests are excluded for this engine, with the reason (data)."""

from __future__ import annotations

from fnmatch import fnmatchcase

AREAS = (
    "runtime",
    "checkpoint",
    "pipe",
    "comm",
    "elasticity",
    "monitor",
    "profiling",
    "utils",
    "linear",
    "model_parallelism",
    "launcher/test_ds_arguments.py",
    "v1/zero",
    "v1/half_precision",
    "v1/accelerator",
    "v1/pin_memory",
    "v1/moe",
    "sequence_parallelism",
    "ulysses_alst",
)
"""Below tests/unit. Excluded: inference, hybrid engine, kernels (ops), compile, autotuning, compression, launchers."""

_FORMAT = "reads or writes the files of DeepSpeed's own checkpoint format, universal ones included"
_INSIDE = "calls or counts what belongs to the inside of DeepSpeed's engine"
_SHARDS = "looks into DeepSpeed's shards: ds_tensor, averaged_gradients, partition(), its flat groups, empty parameters"
_SECTIONS = "calls functions inside of DeepSpeed's reading of the JSON"
_EXPERTS = "calls or counts what belongs to the inside of DeepSpeed's layers of experts"
_SEQUENCES = "sequence parallelism over ranks is not available"

LEFT_OUT: tuple[tuple[str, str], ...] = (
    # checkpoints
    ("unit/checkpoint/test_autotp_uc_checkpoint.py*", _FORMAT),
    ("unit/checkpoint/test_reshape_checkpoint.py*", _FORMAT),
    ("unit/checkpoint/test_universal_checkpoint.py*", _FORMAT),
    ("unit/checkpoint/test_zero_optimizer.py::*test_load_module_only*", _FORMAT),
    ("unit/checkpoint/test_zero_optimizer.py::*test_chmod_exception*", _INSIDE),
    # zero
    ("unit/runtime/zero/test_zero_grad_clip.py*", _INSIDE),
    ("unit/runtime/zero/test_zero_allreduce_fetch_params.py*", _SHARDS),
    ("unit/runtime/zero/test_zero_autocast_mixed_dtype.py*", _SHARDS),
    ("unit/runtime/zero/test_zero_context.py::TestScatterGather*", _SHARDS),
    ("unit/runtime/zero/test_zero_context.py::TestSerialContext::test_throughput_calculation*", _INSIDE),
    ("unit/runtime/zero/test_zero_context.py::test_multiple_all_gather_handles*", _INSIDE),
    ("unit/runtime/zero/test_zero_context_return.py::TestReturnParam::test_ext_param_return*", _INSIDE),
    ("unit/runtime/zero/test_zero_hook_attribute_delegation.py*", _INSIDE),
    ("unit/runtime/zero/test_zero_late_module_attach.py::TestEnsureZeroOrderedDict*", _INSIDE),
    ("unit/runtime/zero/test_zero_linear_direct_init.py::*Persistence*", _INSIDE),
    ("unit/runtime/zero/test_zero_linear_direct_init.py::*DirectInit::*", _INSIDE),
    ("unit/runtime/zero/test_unwrap_model.py::TestUnwrapModel::*", _INSIDE),
    ("unit/v1/zero/test_zero.py::TestPartitionNcclAlignment*", _SHARDS),
    ("unit/v1/zero/test_zero.py::TestZero3ParamPartitioning*", _SHARDS),
    ("unit/v1/zero/test_zero.py::TestParamPartitioningSkipInit*", _SHARDS),
    ("unit/v1/zero/test_zero.py::TestBF16OptimizerGradReduction*", _INSIDE),
    ("unit/v1/zero/test_zero_functorch_linear.py*", _INSIDE),
    ("unit/v1/zero/test_zero_init_pg_contradiction.py*", _INSIDE),
    ("unit/v1/zero/test_overlap_comm_record_stream.py*", _INSIDE),
    ("unit/v1/zero/test_stage2_flatten_on_gpu.py*", _INSIDE),
    ("unit/v1/zero/test_zero_hook_count_regression.py*single_count*", _INSIDE),
    ("unit/v1/zero/test_zero_activation_checkpoint_lifecycle.py*external_parameter*", _INSIDE),
    ("unit/v1/zero/test_zero_activation_checkpoint_lifecycle.py*reused_checkpointed*", _INSIDE),
    ("unit/v1/zero/test_zero.py::TestZero3InitForParentWeightInitialization*", _SHARDS),
    ("unit/v1/zero/test_zero.py::TestZeroAdamOptimizerStepCount*3?", _SHARDS),
    ("unit/v1/zero/test_zero_cpu_offload_grad_accum.py*", _SHARDS),
    ("unit/v1/zero/test_zero2_offload_multi_backward.py::*allocates_no_cpu_accumulator*", _SHARDS),
    ("unit/v1/zero/test_zero_coalesce_grad_reduction.py::TestCoalesceMoE*", _EXPERTS),
    ("unit/v1/zero/test_zero_coalesce_grad_reduction.py::*test_pipeline_parallelism_rejected*", _INSIDE),
    ("unit/v1/zero/test_zero_coalesce_grad_reduction.py::*test_engine_boundary_restored*", _INSIDE),
    ("unit/v1/zero/test_zero_coalesce_grad_reduction.py::*test_micro_step_id*", _INSIDE),
    ("unit/v1/zero/test_zero_coalesce_grad_reduction.py::TestCoalesceCollectiveCount*", _INSIDE),
    ("unit/v1/half_precision/test_mixed_precision_dtype.py::*Resolution*", _INSIDE),
    ("unit/v1/half_precision/test_mixed_precision_dtype.py::*ConfigValidation*", _INSIDE),
    ("unit/v1/half_precision/test_mixed_precision_dtype.py::*test_config_defaults*", _INSIDE),
    ("unit/v1/half_precision/test_mixed_precision_dtype.py::TestCastModule*", _INSIDE),
    # engine
    ("unit/runtime/test_ds_initialize.py::TestBf16ZeRO0UnfusedOptimizer*", _INSIDE),
    ("unit/runtime/test_multiple_models.py::*True-1?", _INSIDE),
    ("unit/runtime/test_multiple_models.py::*True-2?", _INSIDE),
    ("unit/runtime/test_multiple_models.py::*True-3?", _INSIDE),
    ("unit/runtime/comm/*", _INSIDE),
    ("unit/pipe/test_pipe_module.py::TestPipeModuleCheckpointInterval*", _INSIDE),
    ("unit/runtime/test_ds_config_dict.py::TestBatchConfig*", _SECTIONS),
    ("unit/runtime/zero/test_zero_late_module_attach.py*", _INSIDE),
    ("unit/runtime/zero/test_zeropp.py::test_cuda*", _INSIDE),
    ("unit/runtime/zero/test_zeropp.py::test_zero_hpz_s*", _INSIDE),
    ("unit/runtime/test_autocast.py*", "DeepSpeed's own function of linear layers"),
    ("unit/runtime/test_tp_plan_extraction.py*", _INSIDE),
    ("unit/runtime/activation_checkpointing/test_offload_activations.py::test_buffer*", _INSIDE),
    ("unit/runtime/activation_checkpointing/test_offload_activations.py::test_empty*", _INSIDE),
    ("unit/runtime/activation_checkpointing/test_offload_activations.py::test_keep*", _INSIDE),
    ("unit/runtime/activation_checkpointing/test_offload_activations.py::test_marke*", _INSIDE),
    ("unit/runtime/activation_checkpointing/test_offload_activations.py::test_nested*", _INSIDE),
    ("unit/runtime/activation_checkpointing/test_offload_activations.py::test_same*", _INSIDE),
    ("unit/runtime/activation_checkpointing/test_offload_activations.py::test_unmarked*", _INSIDE),
    (
        "unit/v1/half_precision/test_gradient_clipping_default.py::TestGradientClippingConfig::test_*is*",
        _SECTIONS,
    ),
    ("unit/v1/zero/test_offload_states.py*-lp_grads?", _SHARDS),
    ("unit/checkpoint/test_zero_optimizer.py::*exclude*", _FORMAT),
    ("unit/utils/test_groups.py*", _EXPERTS),
    ("unit/comm/test_comms_logger.py::test_get*", _INSIDE),
    ("unit/comm/test_comms_logger.py::test_stop*", _INSIDE),
    ("unit/runtime/test_runtime_utils.py::TestCheckOverflow*", _EXPERTS),
    ("unit/runtime/test_runtime_utils.py::test_count_used_parameters*", _INSIDE),
    ("unit/runtime/pipe/test_topology.py::test_primes*", _INSIDE),
    ("unit/runtime/zero/test_zero_tensor_fragment.py::TestTensorFragmentSet::*local*", _SHARDS),
    ("unit/model_parallelism/test_autotp_training.py::test_init_tp_mesh*", _INSIDE),
    ("unit/model_parallelism/*test_qwen2_tp_plan_with_zero2*", _INSIDE),
    ("unit/model_parallelism/*test_tp_plan_attaches_universal*", _FORMAT),
    ("unit/launcher/test_ds_arguments.py::test_core_binding*", _INSIDE),
    ("unit/runtime/test_runtime_utils.py::TestClipGradNorm::test_gather*", _EXPERTS),
    ("unit/checkpoint/test_zero_optimizer.py::*test_pipeline_checkpoint_loading*", _FORMAT),
    ("unit/runtime/activation_checkpointing/*requires_num_checkpoints*", _INSIDE),
    ("unit/runtime/tensor_parallel/test_autotp_universal_checkpoint.py*", _FORMAT),
    ("unit/runtime/zenflow/test_zf.py::test_split_affinity*", _INSIDE),
    # others
    ("unit/v1/moe/test_autoep*", _EXPERTS),
    ("unit/v1/moe/test_fused_expert_layout.py*", _EXPERTS),
    ("unit/v1/moe/test_moe_tp.py*", "experts are not split over tensor-parallel ranks"),
    ("unit/v1/moe/test_moe.py::TestMoESingleton*", _INSIDE),
    ("unit/v1/moe/test_moe.py::TestTopkGate::test_sparse_dispatch*", _INSIDE),
    (
        "unit/v1/moe/test_moe.py::TestExpertWeightGradWithZero*",
        "state dicts of one rank's experts, from 0 on",
    ),
    ("unit/sequence_parallelism/*", _SEQUENCES),
    ("unit/ulysses_alst/test_ulysses_sp_hf.py*", _SEQUENCES),
    ("unit/v1/pin_memory/*", "DeepSpeed's own pinned memory, an operator in C++"),
    ("unit/v1/accelerator/*", "DeepSpeed's own pinned memory, an operator in C++"),
    ("unit/utils/test_pin_memory_tracker.py*", "DeepSpeed's own pinned memory, an operator in C++"),
)
"""Pattern of test ids -> why they are excluded for this engine; the first match applies."""


WORKS_HERE = (
    "unit/runtime/test_ds_config_dict.py::*rejects_*",
    "unit/runtime/test_no_sync_ctxt.py::*test_zero_stage?2*",
    "unit/runtime/test_no_sync_ctxt.py::*test_zero_stage?3*",
    "unit/runtime/zero/test_zero_leaf_module.py::*test_no_grad_input_error*",
    "unit/v1/zero/test_zero.py::TestIncorectAllgatherBucketSize*1001?",
    "unit/v1/zero/test_zero.py::TestZeroOffloadOptim::*True?",
    "unit/v1/zero/test_zero_coalesce_grad_reduction.py::*test_existing_no_sync_still_blocked*",
    "unit/v1/zero/test_zero_coalesce_grad_reduction.py::*test_zero1_no_offload_uses_bf16_optimizer*",
    "unit/v1/zero/test_zero_torch_func.py::TestZero0DirectBackwardStillRaises*",
    "unit/v1/zero/test_zero_user_backward.py::*test_unmanaged_rejects_coalesce*",
    "unit/v1/zero/test_zero_user_backward.py::*test_unmanaged_rejects_overlap*",
)
"""Tests that are run and fail, because they check that DeepSpeed refuses something that works here."""


def works_here(test: str) -> bool:
    """Return whether a test checks that DeepSpeed refuses something that works here."""
    return any(fnmatchcase(test, pattern) for pattern in WORKS_HERE)


def why_left_out(test: str) -> str | None:
    """Return the reason for excluding a test, or None if it is run."""
    return next((reason for pattern, reason in LEFT_OUT if fnmatchcase(test, pattern)), None)


def area_of(test: str) -> str:
    """Return the directory of a test id, as in the table."""
    path = test.partition("::")[0].removeprefix("unit/")
    below, _, name = path.rpartition("/")
    if below == "runtime":
        return "runtime/*.py"
    return below or name
