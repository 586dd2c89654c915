"""The names of the `deepspeed` package that scripts see, and the attributes that implement them.

Names that are not available are in `refused.py`; differences of available names are listed in
docs/deepspeed_api.md.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.19.8"
"""The DeepSpeed version whose names are provided; scripts require at least 0.18.2."""
MAJOR, MINOR, PATCH = (int(part) for part in VERSION.split("."))

_PACKAGE = "launcher.integrations"
_HERE, _BEFORE = f"{_PACKAGE}.stand_ins", f"{_PACKAGE}.processes"
_OPTIMIZERS, _UTILITIES = f"{_PACKAGE}.optimizers", f"{_PACKAGE}.utilities"
_ENUMERATIONS, _GROUPS = f"{_PACKAGE}.enumerations", f"{_PACKAGE}.groups"
_DEVICE, _KINDS = f"{_PACKAGE}.accelerator", f"{_PACKAGE}.optimizer_kinds"


def _from(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_ENGINE = {"DeepSpeedEngine": "launcher.engine:Engine"}
_CONFIG = {
    "DeepSpeedConfig": f"{_PACKAGE}.configuration:DeepSpeedConfig",
    "DeepSpeedConfigError": f"{_ENUMERATIONS}:DeepSpeedConfigError",
}
_ACCELERATOR = _from(
    _DEVICE, "get_accelerator", "set_accelerator", "is_current_accelerator_supported", "DeepSpeedAccelerator"
)
_EXTERNAL = {
    "register_external_parameter": f"{_HERE}:register_external_parameter",
    "unregister_external_parameter": f"{_HERE}:register_external_parameter",
}
_ZERO = {
    "Init": f"{_HERE}:Init",
    "GatheredParameters": "launcher.zero:GatheredParameters",
    **_from(_ENUMERATIONS, "ZeroParamStatus", "ZeroParamType"),
    **_EXTERNAL,
    **_from(f"{_PACKAGE}.tiling", "TiledLinear", "TiledLinearReturnBias"),
    **_from(f"{_HERE}", "unwrap_model_for_generation"),
}
_LEAVES = _from(
    "launcher.zero",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "get_z3_leaf_modules",
    "unset_z3_leaf_modules",
)
_IS_LEAF = _from(f"{_PACKAGE}.marks", "z3_leaf_module")
_FRAGMENTS = _from(
    "launcher.engine.fragments",
    *(
        f"safe_{verb}_{extent}_{what}"
        for verb in ("get", "set")
        for extent in ("full", "local")
        for what in ("fp32_param", "optimizer_state", "grad")
    ),
    "safe_update_full_grad_vectorized",
)
_NAMES_OF_FILES = _from(
    f"{_PACKAGE}.files",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
)
_FILES_OF_ZERO = _from(
    f"{_PACKAGE}.files",
    "get_checkpoint_files",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
)
_TORCH_FILES = _from(f"{_PACKAGE}.files", "TorchCheckpointEngine")
_NESTED = _from(f"{_PACKAGE}.nested", "recursive_getattr", "recursive_setattr")
_LOG = _from(_UTILITIES, "log_dist", "log_dist_once", "set_log_level_from_string")
_PIPE = _from("launcher.pipe", "LayerSpec", "PipelineModule", "TiedLayerSpec")
_FP32 = _from(
    "launcher.checkpoint.fp32",
    "get_fp32_state_dict_from_zero_checkpoint",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "load_state_dict_from_zero_checkpoint",
)
_COMM_FIRST = {
    **_from(
        _BEFORE, "init_distributed", "is_initialized"
    ),  # used before there is an engine, so they must not import it
    "log_summary": "launcher.comm:log_summary",
}
_ROLLOUT = _from(
    f"{_PACKAGE}.rollout",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
)
_MEMORY = f"{_PACKAGE}.memory_needs"
_OPS = f"{_PACKAGE}.builders"
_BUILDER = _from(_OPS, "AsyncIOBuilder")
_SECTIONS = f"{_PACKAGE}.sections"
_OFFLOADS = _from(_SECTIONS, "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig")
_BWC = _from(
    f"{_PACKAGE}.groups",
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
)

_BERT = _from(f"{_PACKAGE}.transformer_layer", "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer")
_PASSES = f"{_PACKAGE}.compiler_passes"
_SPLIT = _from(f"{_PACKAGE}.split_parameters", "LinearAllreduce", "LinearLayer")
_UNIVERSAL = _from(_HERE, "enable_universal_checkpoint")

NAMES: Mapping[str, Mapping[str, str]] = {
    "": {
        **_ENGINE,
        **_CONFIG,
        "initialize": f"{_HERE}:initialize",
        **_from(f"{_PACKAGE}.inference", "InferenceEngine", "init_inference"),
        "init_distributed": f"{_BEFORE}:init_distributed",
        "tp_model_init": f"{_HERE}:tp_model_init",
        "set_optimizer_flags": f"{_HERE}:set_optimizer_flags",
        "add_config_arguments": "launcher.arguments:add_config_arguments",
        "PipelineModule": "launcher.pipe:PipelineModule",
        "PipelineEngine": "launcher.engine:Engine",
        "DeepSpeedDataLoader": f"{_PACKAGE}.loading:DeepSpeedDataLoader",
        "DeepSpeedOptimizer": f"{_KINDS}:DeepSpeedOptimizer",
        "OnDevice": f"{_UTILITIES}:OnDevice",
        "log_dist": f"{_UTILITIES}:log_dist",
        "logger": f"{_BEFORE}:logger",
        "get_accelerator": f"{_DEVICE}:get_accelerator",
        "dist": f"{_PACKAGE}.collectives:",
        "version": f"{_PACKAGE}.served:VERSION",
        "__version__": f"{_PACKAGE}.served:VERSION",
        "__version_major__": f"{_PACKAGE}.served:MAJOR",
        "__version_minor__": f"{_PACKAGE}.served:MINOR",
        "__version_patch__": f"{_PACKAGE}.served:PATCH",
        "__git_hash__": f"{_PACKAGE}.version_report:git_hash",
        "__git_branch__": f"{_PACKAGE}.version_report:git_branch",
        "load_ds_config": f"{_PACKAGE}.configuration:load_ds_config",
        **_BERT,
    },
    "accelerator": _ACCELERATOR,
    "accelerator.abstract_accelerator": _from(_DEVICE, "DeepSpeedAccelerator"),
    "accelerator.real_accelerator": {
        **_ACCELERATOR,
        "SUPPORTED_ACCELERATOR_LIST": f"{_DEVICE}:SUPPORTED_ACCELERATOR_LIST",
    },
    "checkpoint": {**_NAMES_OF_FILES, **_UNIVERSAL},
    "checkpoint.constants": {},
    "checkpoint.utils": {
        **_NAMES_OF_FILES,
        "clone_tensors_for_torch_save": f"{_HERE}:clone_tensors_for_torch_save",
    },
    "checkpoint.universal_checkpoint": _UNIVERSAL,
    "checkpointing": {},
    "comm": {**_COMM_FIRST, **_from(_BEFORE, "mpi_discovery")},
    "comm.comm": {**_COMM_FIRST, **_from(_BEFORE, "mpi_discovery")},
    "comm.constants": {},
    "comm.pg_utils": {},
    "comm.reduce_op": {"ReduceOp": f"{_PACKAGE}.collectives:ReduceOp"},
    "comm.torch": {},
    "comm.utils": {},
    "compile.passes": {},
    "compile.passes.offload_adam_states": _from(
        _PASSES, "move_opt_states", "move_opt_states_sync", "offload_adam_states_for_init"
    ),
    "compile.passes.prefetch": _from(_PASSES, "schedule_prefetch"),
    "compile.passes.selective_gather": _from(_PASSES, "selective_gather"),
    "compile.passes.sp_compile": _from(_PASSES, "prepare_autosp_inputs"),
    "compile.passes.zero3_compile": _from(_PASSES, "add_z3_gather_release"),
    "compile.passes.zero_1_and_2_compile": _from(_PASSES, "add_z1_reduce"),
    "compression.helper": _NESTED,
    "constants": {"default_pg_timeout": f"{_BEFORE}:WAIT"},
    "elasticity": {},
    "elasticity.elasticity": {},
    "elasticity.config": {},
    "env_report": {},
    "git_version_info": {},
    "io": _from(
        f"{_PACKAGE}.file_writers", "FastFileWriter", "FastFileWriterConfig", "MockFileWriter", "PyFileWriter"
    ),
    "launcher.constants": {},
    "launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": f"{_BEFORE}:DEEPSPEED_ENVIRONMENT_NAME",
        "main": "launcher.cli.main:main",
        **_from(f"{_PACKAGE}.hostfiles", "EXPORT_ENVS", "fetch_hostfile", "parse_inclusion_exclusion"),
    },
    "module_inject": _SPLIT,
    "module_inject.layers": {
        **_SPLIT,
        **_from(f"{_PACKAGE}.split_parameters", "GatherReplacedLayerParams"),
    },
    "module_inject.policy": _from(_UTILITIES, "transpose"),
    "moe.layer": _from(f"{_PACKAGE}.experts", "MoE"),
    "moe.sharded_moe": _from(f"{_PACKAGE}.gating", "top1gating", "top2gating", "topkgating"),
    "moe.utils": {},
    "monitor": {},
    "monitor.comet": _from(f"{_PACKAGE}.monitors", "CometMonitor"),
    "monitor.config": _from(_SECTIONS, "DeepSpeedMonitorConfig"),
    "monitor.csv_monitor": _from(f"{_PACKAGE}.monitors", "csvMonitor"),
    "monitor.monitor": _from(f"{_PACKAGE}.monitors", "MonitorMaster", "Monitor"),
    "monitor.tensorboard": _from(f"{_PACKAGE}.monitors", "TensorBoardMonitor"),
    "monitor.wandb": _from(f"{_PACKAGE}.monitors", "WandbMonitor"),
    "ops": {"__compatible_ops__": f"{_OPS}:COMPATIBLE_OPS"},
    "ops.adagrad": _from(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "ops.adagrad.cpu_adagrad": _from(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "ops.adam": _from(_OPTIMIZERS, "DeepSpeedCPUAdam", "FusedAdam"),
    "ops.adam.cpu_adam": _from(_OPTIMIZERS, "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _from(_OPTIMIZERS, "FusedAdam"),
    "ops.adam.multi_tensor_apply": _from(_OPTIMIZERS, "MultiTensorApply"),
    "ops.aio": _BUILDER,
    "ops.lamb": _from(_OPTIMIZERS, "FusedLamb"),
    "ops.lamb.fused_lamb": _from(_OPTIMIZERS, "FusedLamb"),
    "ops.lion": _from(_OPTIMIZERS, "DeepSpeedCPULion", "FusedLion"),
    "ops.lion.cpu_lion": _from(_OPTIMIZERS, "DeepSpeedCPULion"),
    "ops.lion.fused_lion": _from(_OPTIMIZERS, "FusedLion"),
    "ops.op_builder": {},
    "ops.op_builder.async_io": _BUILDER,
    "ops.op_builder.builder": _from(_OPS, "OpBuilder"),
    "ops.transformer": _BERT,
    "pipe": _PIPE,
    "profiling.constants": {},
    "profiling.flops_profiler": {},
    "profiling.flops_profiler.profiler": {},
    "runtime.activation_checkpointing.checkpointing": _from(_HERE, "CheckpointFunction"),
    "runtime.checkpoint_engine": _TORCH_FILES,
    "runtime.checkpoint_engine.torch_checkpoint_engine": _TORCH_FILES,
    "runtime.base_optimizer": _from(_KINDS, "DeepSpeedOptimizer", "ZeROOptimizer"),
    "runtime.bf16_optimizer": _from(_KINDS, "BF16_Optimizer"),
    "runtime.fp16.fused_optimizer": _from(_KINDS, "FP16_Optimizer"),
    "runtime.fp16.loss_scaler": {},
    "runtime.fp16.unfused_optimizer": _from(_KINDS, "FP16_UnfusedOptimizer"),
    "runtime.config": {**_CONFIG, "DtypeEnum": f"{_ENUMERATIONS}:DtypeEnum"},
    "runtime.constants": _from(_ENUMERATIONS, "ValidationMode"),
    "runtime.config_utils": {
        **_from(f"{_PACKAGE}.configuration", "dict_raise_error_on_duplicate_keys"),
        **_from(f"{_PACKAGE}.config_model", "DeepSpeedConfigModel"),
    },
    "runtime.data_pipeline.constants": {},
    "runtime.data_pipeline.curriculum_scheduler": _from(f"{_PACKAGE}.curriculum", "CurriculumScheduler"),
    "runtime.data_pipeline.data_sampling.indexed_dataset": _from(
        f"{_PACKAGE}.indexed_dataset",
        "MMapIndexedDataset",
        "MMapIndexedDatasetBuilder",
        "code",
        "data_file_path",
        "index_file_path",
    ),
    "runtime.dataloader": {
        "RepeatingLoader": f"{_UTILITIES}:RepeatingLoader",
        "DeepSpeedDataLoader": f"{_PACKAGE}.loading:DeepSpeedDataLoader",
    },
    "runtime.engine": {
        **_ENGINE,
        **_from(f"{_PACKAGE}.experts", "MoE"),
        **_from(_HERE, "autocast_if_enabled"),
    },
    "inference.config": _from(_ENUMERATIONS, "DtypeEnum"),
    "inference.engine": _from(f"{_PACKAGE}.inference", "InferenceEngine"),
    "runtime.lr_schedules": {"VALID_LR_SCHEDULES": f"{_BEFORE}:VALID_LR_SCHEDULES"},
    "runtime.pipe": _PIPE,
    "runtime.pipe.engine": {**_ENGINE, "PipelineEngine": "launcher.engine:Engine"},
    "runtime.pipe.module": {**_PIPE, **_from(_ENUMERATIONS, "PipelineError")},
    "runtime.pipe.p2p": {},
    "runtime.pipe.schedule": {},
    "runtime.pipe.topology": {},
    "runtime.precision_config": _from(
        _SECTIONS, "DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"
    ),
    "runtime.sequence_parallel.ulysses_sp": {
        **_from(
            f"{_PACKAGE}.tiled_compute",
            "AutogradComputeMLP",
            "SequenceTiledCompute",
            "TiledFusedLogitsLoss",
            "TiledMLP",
            "sequence_tiled_compute",
        ),
        **_from(f"{_PACKAGE}.ulysses", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"),
    },
    "runtime.rollout": _ROLLOUT | _from(f"{_PACKAGE}.rollout", "HybridEngineRollout", "build_rollout"),
    "runtime.rollout.base": _ROLLOUT,
    "runtime.rollout.hybrid_engine_rollout": _from(
        f"{_PACKAGE}.rollout", "HybridEngineRollout", "HybridEngineRolloutConfig"
    ),
    "runtime.state_dict_factory": _from(f"{_PACKAGE}.files", "MegatronSDLoader"),
    "runtime.utils": {
        "bwc_tensor_model_parallel_rank": f"{_GROUPS}:bwc_tensor_model_parallel_rank",
    },
    "runtime.zenflow.zenflow_config": {"ZenFlowConfig": f"{_SECTIONS}:DeepSpeedZenFlowConfig"},
    "runtime.zero": _ZERO,
    "runtime.zero.config": {
        **_from(_ENUMERATIONS, "ZeroStageEnum"),
        **_OFFLOADS,
        **_from(_SECTIONS, "DeepSpeedZeroConfig", "DeepSpeedZeroLeafModuleConfig"),
    },
    "runtime.zero.leaf_module_config": _from(
        _SECTIONS,
        "DEFAULT_LEAF_MODULE_CLASSES",
        "DEFAULT_LEAF_MODULE_NAMES",
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
        "DeepSpeedZeroLeafModuleConfig",
    ),
    "runtime.zero.offload_config": {
        **_from(_ENUMERATIONS, "OffloadDeviceEnum", "OffloadStateTypeEnum"),
        **_OFFLOADS,
    },
    "runtime.zero.partition_parameters": {
        **{name: home for name, home in _ZERO.items() if "Tiled" not in name and "unwrap" not in name},
        # transformers replaces the first name, for use in zero.Init; this function leaves dtypes unchanged
        "zero_wrapper_for_fp_tensor_constructor": f"{_HERE}:unchanged",
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": f"{_DEVICE}:get_accelerator",
    },
    "runtime.zero.stage3": {
        **_from(_KINDS, "DeepSpeedZeroOptimizer_Stage3"),
        **_from(
            _MEMORY,
            "estimate_zero3_model_states_mem_needs",
            "estimate_zero3_model_states_mem_needs_all_cold",
            "estimate_zero3_model_states_mem_needs_all_live",
        ),
    },
    "runtime.zero.stage_1_and_2": {
        **_from(_KINDS, "DeepSpeedZeroOptimizer"),
        **_from(
            _MEMORY,
            "estimate_zero2_model_states_mem_needs",
            "estimate_zero2_model_states_mem_needs_all_cold",
            "estimate_zero2_model_states_mem_needs_all_live",
        ),
    },
    "runtime.zero.tiling": _from(
        f"{_PACKAGE}.tiling", "TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"
    ),
    "runtime.zero.utils": {
        **_from(_ENUMERATIONS, "ZeRORuntimeException"),
        **_from(f"{_PACKAGE}.marks", "is_zero_param"),
        **_from(f"{_PACKAGE}.nested", "apply_to_tensors_only"),
        **_from(f"{_HERE}", "is_zero_supported_optimizer"),
    },
    "sequence.fpdt_layer": _from(
        f"{_PACKAGE}.chunked_sequences",
        "FPDT_Attention",
        "FPDT_FFN",
        "FPDT_InputConstruct",
        "FPDT_LogitsLoss",
    ),
    "utils": {
        **_LEAVES,
        **_FRAGMENTS,
        **_IS_LEAF,
        **_LOG,
        **_NESTED,
        **_from(_UTILITIES, "RepeatingLoader", "instrument_w_nvtx", "OnDevice"),
        **_from(_ENUMERATIONS, "DeprecatedException"),
        **_from(
            _GROUPS,
            "bwc_pipeline_parallel_world_size",
            "bwc_tensor_model_parallel_world_size",
            "get_data_parallel_group",
            "get_data_parallel_rank",
            "get_data_parallel_world_size",
            "get_model_parallel_group",
            "get_model_parallel_rank",
            "get_model_parallel_world_size",
            "get_tensor_model_parallel_group",
            "get_tensor_model_parallel_rank",
            "get_tensor_model_parallel_src_rank",
            "get_tensor_model_parallel_world_size",
        ),
        "get_accelerator": f"{_DEVICE}:get_accelerator",
        "is_initialized": f"{_BEFORE}:is_initialized",
        "logger": f"{_BEFORE}:logger",
    },
    "utils.bwc": _BWC,
    "utils.config": {},
    "utils.exceptions": _from(_ENUMERATIONS, "DeprecatedException"),
    "utils.groups": {},
    "utils.init_on_device": _from(_UTILITIES, "OnDevice"),
    "utils.logging": {},
    "utils.module_utils": _NESTED,
    "utils.nvtx": _from(_UTILITIES, "instrument_w_nvtx"),
    "utils.tensor_fragment": _FRAGMENTS,
    "utils.timer": {},
    "utils.torch": _from(f"{_PACKAGE}.nested", "required_torch_version", "register_grad_hook"),
    "utils.z3_leaf_module": {**_LEAVES, **_IS_LEAF},
    "utils.zero_to_fp32": {**_FP32, **_FILES_OF_ZERO, "__file__": "launcher.checkpoint.fp32:__file__"},
    "zero": _ZERO,
}
"""Module below `deepspeed` -> name -> `module:attribute` that provides it; `module:` is the module itself."""
