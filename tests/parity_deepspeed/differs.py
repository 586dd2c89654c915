"""Available DeepSpeed names that behave differently here, with the difference. Data for docs/deepspeed_api.md."""

from __future__ import annotations

from collections.abc import Mapping

_DATA = "the keys of DeepSpeed's checkpoint files; launcher's checkpoints do not use them"
_SHOWN = "read-only; defaults as in docs/config.md; contradictory keys are refused"
_KINDS = "supports isinstance(engine.optimizer, ...); one optimizer class serves all stages"
_OURS = "launcher's error class; the message includes a fix"
_BY_RULE = (
    "computed by launcher's own formula; `launch memory-estimate` traces the model and includes activations"
)
_START = "the device determines the backend; without a launcher, mpirun or srun, the world size is 1"
_KEPT = (
    "same as launcher.checkpointing; the activation_checkpointing section determines how inputs are stored"
)
_RUN = "the model itself, converted to a dtype: no kernel injection, tensor parallelism or quantization"
_BUILT = "nothing is compiled; operators without a counterpart in launcher are reported as incompatible"
_LAYER = "any numbers of heads and tokens are supported; rotary_pos_emb is refused"
_SLICES = "does not patch transformers: initialize(mpu=...) modifies the model; attention and document masks are kept"
_ADAPTER = "pads to a multiple of the number of ranks, and adds position_ids if they are missing"
_SPLIT = ("LinearAllreduce", "LinearLayer")
_NVTX = "returns the function unchanged; profiles contain launcher's own ranges"

DIFFERS: Mapping[str, str] = {
    **dict.fromkeys(("InferenceEngine", "init_inference", "inference.engine.InferenceEngine"), _RUN),
    **dict.fromkeys(
        ("DeepSpeedTransformerLayer", "ops.transformer.DeepSpeedTransformerLayer"),
        "uses torch operators; adjust_init_range scales the residual weights on every rank, not only on rank 0",
    ),
    **dict.fromkeys(
        (
            "compile.passes.offload_adam_states",
            "compile.passes.prefetch",
            "compile.passes.selective_gather",
            "compile.passes.zero3_compile",
            "compile.passes.zero_1_and_2_compile",
        ),
        "accepted in engine.compile(schedule=...), but has no effect",
    ),
    "compile.passes.sp_compile": "returns the inputs unchanged: sequence_parallel_size in the JSON shards sequences",
    "io.FastFileWriter": "uses plain system calls and ignores the configured buffers; one writer per file",
    **dict.fromkeys(
        (f"{module}.{name}" for module in ("module_inject", "module_inject.layers") for name in _SPLIT),
        "only for isinstance(): tensor_parallel in the JSON creates the layers",
    ),
    **dict.fromkeys(
        (
            "checkpoint.enable_universal_checkpoint",
            "checkpoint.universal_checkpoint.enable_universal_checkpoint",
        ),
        "no effect: checkpoints load on any number of ranks",
    ),
    "runtime.state_dict_factory.MegatronSDLoader": "cannot be instantiated; scripts can override its sanity_check",
    "sequence.fpdt_layer.FPDT_Attention": "uses torch's attention; keys and values stay on the device",
    "sequence.fpdt_layer.FPDT_FFN": "the second bias also gets its gradient if it is returned instead of added",
    "initialize": "unsupported config sections are errors; the sizes of an mpu must match the JSON",
    "sequence.layer.DistributedAttention": _LAYER,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": _SLICES,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": _ADAPTER,
    "init_distributed": _START,
    "comm.init_distributed": _START,
    "comm.comm.init_distributed": _START,
    "tp_model_init": "returns the model unchanged: initialize() splits its layers over tp_size ranks",
    "set_optimizer_flags": "no effect: Muon detects its matrices automatically",
    "add_config_arguments": "adds the same flags",
    "DeepSpeedConfig": "read-only; all invalid keys are reported at once",
    "DeepSpeedConfigError": _OURS,
    "accelerator.real_accelerator.set_accelerator": "custom accelerators are refused",
    "accelerator.set_accelerator": "custom accelerators are refused",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.reset_peak_memory_stats": "on CPUs, the peak is not reset",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.replay_graph": "an error on CPUs: there are no CUDA graphs",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.memory_stats": "on CPUs, the memory of the process",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.is_triton_supported": "False: no kernel requires Triton",
    "checkpoint.constants": _DATA,
    "checkpoint.deepspeed_checkpoint": _DATA,
    "comm.configure": "logging of collectives is enabled in the JSON: comms_logger",
    "comm.comm.configure": "logging of collectives is enabled in the JSON: comms_logger",
    "comm.TorchBackend": "torch.distributed's all-gather and reduce-scatter; process groups are torch's own",
    "comm.torch.TorchBackend": "torch.distributed's all-gather and reduce-scatter; process groups are torch's own",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.get_op_builder": _BUILT,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.create_op_builder": _BUILT,
    "comm.get_rank": "also works before process groups are initialized",
    "comm.get_world_size": "also works before process groups are initialized",
    "comm.log_summary": "covers the engine's collectives only, not those that a script calls itself",
    "env_report": "prints versions; there are no operators to build",
    "git_version_info": "the emulated DeepSpeed version, and the versions installed here",
    "module_inject.layers.GatherReplacedLayerParams": "read-only: changes inside are an error; not for stage 3",
    "runtime.engine.DeepSpeedEngine.clip_fp32_gradients": "no effect: step() clips",
    "moe.layer.MoE": "expert weights are stacked in one tensor per parameter; state dicts list every expert, as with "
    "ep_size=1; all layers with ep_size > 1 must use the same ep_size; works at every ZeRO stage",
    "ops.__compatible_ops__": "operators with a counterpart in launcher; nothing is built",
    "ops.adam.FusedAdam": "bias_correction=False must be set in the JSON; the engine steps on any device",
    "ops.adam.DeepSpeedCPUAdam": "bias_correction=False must be set in the JSON; the engine steps on any device",
    "ops.lamb.FusedLamb": "max_grad_norm is refused; set gradient_clipping in the JSON",
    "ops.op_builder": _BUILT,
    "runtime.sequence_parallel.ulysses_sp": "each tile's forward is recomputed in its backward, also for losses",
    "utils.zero_to_fp32.__file__": "a copy of the script also reads launcher's checkpoints",
    **dict.fromkeys(
        (
            f"utils.zero_to_fp32.{name}"
            for name in (
                "get_checkpoint_files",
                "get_model_state_file",
                "get_model_state_files",
                "get_optim_files",
            )
        ),
        "only for checkpoints written by DeepSpeed; an error for launcher's, which consist of other files",
    ),
    "profiling.flops_profiler": "counts the executed operations with torch's formulas; ignore_list is refused",
    "runtime.activation_checkpointing.checkpointing": _KEPT,
    "checkpointing": _KEPT,
    "DeepSpeedOptimizer": _KINDS,
    "launcher.runner.EXPORT_ENVS": "only what a program adds; docs/guides/clusters.md has the default variables",
    "runtime.base_optimizer.DeepSpeedOptimizer": _KINDS,
    "runtime.base_optimizer.ZeROOptimizer": _KINDS,
    "runtime.checkpoint_engine": "load() accepts only tensors and plain values",
    "runtime.bf16_optimizer.BF16_Optimizer": _KINDS,
    "runtime.fp16.fused_optimizer.FP16_Optimizer": _KINDS,
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": _KINDS,
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": _KINDS,
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": _KINDS,
    "runtime.config.DeepSpeedConfig": "read-only; all invalid keys are reported at once",
    "runtime.config.DeepSpeedConfigError": _OURS,
    "runtime.precision_config": _SHOWN,
    "runtime.zero.config.DeepSpeedZeroConfig": _SHOWN,
    "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig": _SHOWN,
    "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig": _SHOWN,
    "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig": _SHOWN,
    "monitor.config.DeepSpeedMonitorConfig": _SHOWN,
    "runtime.engine.DeepSpeedEngine": "launcher's engine",
    "runtime.engine.DeepSpeedEngine.backward": "the returned loss is detached",
    "runtime.engine.DeepSpeedEngine.compile": "compiles each block of the model separately",
    "runtime.engine.DeepSpeedEngine.config": "the resolved JSON, as a dict",
    "runtime.engine.DeepSpeedEngine.no_sync": "works at every stage; at stages 2 and 3, gradients are unsharded inside",
    "runtime.engine.DeepSpeedEngine.offload_states": "works at every stage; lp_params and lp_grads are refused",
    "runtime.engine.DeepSpeedEngine.save_checkpoint": "writes launcher's format, which loads on any number of ranks",
    "runtime.engine.DeepSpeedEngine.load_checkpoint": "loads both formats; custom_load_fn is refused; "
    "returns the directory, and only the script's own client state",
    "runtime.engine.DeepSpeedEngine.get_wall_clock_timers": "milliseconds per phase, with launcher's phase names",
    "runtime.engine.DeepSpeedEngine.timers": "launcher's timers: `with timers(name)`",
    "runtime.engine.DeepSpeedEngine.tput_timer": "controlled by the engine alone; disabled without steps_per_print",
    "runtime.pipe.engine.PipelineEngine": "the same engine class: pipeline models are trained with train_batch()",
    "runtime.pipe.engine.DeepSpeedEngine": "launcher's engine",
    "DeepSpeedEngine": "launcher's engine",
    "PipelineEngine": "the same engine class: pipeline models are trained with train_batch()",
    "runtime.pipe.schedule": "for inspection and tests; the engine runs the schedule set by pipeline.schedule",
    "runtime.pipe.module.PipelineError": _OURS,
    "runtime.zero.utils.ZeRORuntimeException": _OURS,
    "runtime.zero.utils.is_zero_supported_optimizer": "True for every torch optimizer",
    "utils.exceptions.DeprecatedException": _OURS,
    "utils.DeprecatedException": _OURS,
    **{
        f"runtime.zero.{module}.estimate_zero{stage}_model_states_mem_needs{form}": _BY_RULE
        for module, stage in (("stage3", 3), ("stage_1_and_2", 2))
        for form in ("", "_all_cold", "_all_live")
    },
    "runtime.zero.register_external_parameter": "not needed, no effect",
    "runtime.zero.partition_parameters.register_external_parameter": "not needed, no effect",
    "runtime.zero.partition_parameters.unregister_external_parameter": "not needed, no effect",
    "zero.register_external_parameter": "not needed, no effect",
    "runtime.zero.partition_parameters.ZeroParamType": "launcher never uses REMOTE",
    "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": "does not change dtypes",
    "utils.instrument_w_nvtx": _NVTX,
    "utils.nvtx.instrument_w_nvtx": _NVTX,
    "runtime.utils.partition_balanced": "the heaviest part has the same weight; equally good partitions may differ",
    "runtime.zero.GatheredParameters": "gathered parameters stay gathered during forwards inside the context",
    "utils.groups": "groups of the newest engine; before there is one, all ranks",
    "utils.zero_to_fp32": "also reads launcher's checkpoints",
    "parameter.ds_id": "exists only at ZeRO stage 3, and not while the parameter is gathered in its module",
    "parameter.ds_persist": "False for sharded parameters; parameters that stay unsharded are plain ones",
    "parameter.ds_active_sub_modules": "always empty",
    "parameter.ds_external_parameters": "always empty",
}
"""Name below `deepspeed`, or a prefix of one -> the difference. The longest match wins."""


def difference_of(name: str) -> str:
    """Return how an available name differs from DeepSpeed's; "" if it does not."""
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        if (found := DIFFERS.get(".".join(parts[:number]))) is not None:
            return found
    return ""
