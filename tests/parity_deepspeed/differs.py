"""Names of DeepSpeed's that are here and are not quite the same: how, in a sentence. Data for docs/deepspeed_api.md."""

from __future__ import annotations

from collections.abc import Mapping

_DATA = "the keys of DeepSpeed's own files; launcher's checkpoints have no such files"
_SHOWN = "read-only; defaults are those of docs/config.md, and keys that contradict each other are refused"
_KINDS = "makes isinstance(engine.optimizer, ...) work; one class steps at every stage"
_OURS = "launcher's error, which says what to write instead"
_BY_RULE = "by launcher's own rule; `launch memory-estimate` traces the model and knows activations"
_START = "the backend follows from the device; without a launcher, mpirun or srun there is one process"
_KEPT = "as launcher.checkpointing; inputs are kept as the JSON's section says"
_RUN = "the model itself in a dtype: no kernels are put in, and it is not split or quantised"
_BUILT = "nothing is compiled; what has no counterpart here is not compatible, as when it cannot be compiled"
_LAYER = "called with heads and tokens of any sizes; rotary_pos_emb is refused"
_SLICES = (
    "nothing of transformers is replaced: initialize(mpu=...) changes the model; masks and documents are kept"
)
_ADAPTER = "pads to a multiple of the ranks, and makes position_ids where there are none"
_SPLIT = ("LinearAllreduce", "LinearLayer")
_NVTX = "a profile has launcher's own ranges"

DIFFERS: Mapping[str, str] = {
    **dict.fromkeys(("InferenceEngine", "init_inference", "inference.engine.InferenceEngine"), _RUN),
    **dict.fromkeys(
        ("DeepSpeedTransformerLayer", "ops.transformer.DeepSpeedTransformerLayer"),
        "torch's operators; new weights of residual branches are smaller on every rank, not on the first alone",
    ),
    **dict.fromkeys(
        (
            "compile.passes.offload_adam_states",
            "compile.passes.prefetch",
            "compile.passes.selective_gather",
            "compile.passes.zero3_compile",
            "compile.passes.zero_1_and_2_compile",
        ),
        "names a pass for engine.compile(schedule=...), where it has no effect",
    ),
    "compile.passes.sp_compile": "gives them as they are: sequence_parallel_size of the JSON shares sequences",
    "io.FastFileWriter": "by system calls, without the buffers of its config; one writer of a file",
    **dict.fromkeys(
        (f"{module}.{name}" for module in ("module_inject", "module_inject.layers") for name in _SPLIT),
        "for isinstance(): tensor_parallel of the JSON makes the layers",
    ),
    **dict.fromkeys(
        (
            "checkpoint.enable_universal_checkpoint",
            "checkpoint.universal_checkpoint.enable_universal_checkpoint",
        ),
        "does nothing: a checkpoint loads on any number of ranks",
    ),
    "runtime.state_dict_factory.MegatronSDLoader": "reads nothing; scripts can put a check of their own into it",
    "sequence.fpdt_layer.FPDT_Attention": "by torch's attention; keys and values stay on the device",
    "sequence.fpdt_layer.FPDT_FFN": "the second bias has its gradient where it is not added, too",
    "initialize": "unsupported config sections are errors; an mpu is taken where its sizes are the JSON's",
    "sequence.layer.DistributedAttention": _LAYER,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": _SLICES,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": _ADAPTER,
    "init_distributed": _START,
    "comm.init_distributed": _START,
    "comm.comm.init_distributed": _START,
    "tp_model_init": "gives the model as it is: initialize() splits its layers, over tp_size ranks",
    "set_optimizer_flags": "does nothing: Muon finds its matrices by itself",
    "add_config_arguments": "the same flags",
    "DeepSpeedConfig": "read-only; all wrong keys are reported at once",
    "DeepSpeedConfigError": _OURS,
    "accelerator.real_accelerator.set_accelerator": "an accelerator of one's own is refused",
    "accelerator.set_accelerator": "an accelerator of one's own is refused",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.reset_peak_memory_stats": "on a CPU the peak stays",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.replay_graph": "on a CPU an error: nothing was captured",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.memory_stats": "on a CPU the memory of the process",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.is_triton_supported": "false: no kernel here needs it",
    "checkpoint.constants": _DATA,
    "checkpoint.deepspeed_checkpoint": _DATA,
    "comm.configure": "the log of collectives is switched on in the JSON: comms_logger",
    "comm.comm.configure": "the log of collectives is switched on in the JSON: comms_logger",
    "comm.TorchBackend": "its two functions of torch.distributed; the process group is torch's own",
    "comm.torch.TorchBackend": "its two functions of torch.distributed; the process group is torch's own",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.get_op_builder": _BUILT,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.create_op_builder": _BUILT,
    "comm.get_rank": "works before there are process groups, too",
    "comm.get_world_size": "works before there are process groups, too",
    "comm.log_summary": "what the engine sent; collectives that a script calls itself are not in it",
    "env_report": "prints the versions; there are no operators to build",
    "git_version_info": "the version whose names these are, and what is installed here",
    "module_inject.layers.GatherReplacedLayerParams": "to read: a change inside is an error; not at stage 3",
    "runtime.engine.DeepSpeedEngine.clip_fp32_gradients": "nothing is left to do: step() clips",
    "moe.layer.MoE": "experts lie in one tensor each, with a row for each; state dicts name them one by one, as if "
    "ep_size were 1; all layers with ep_size > 1 have the same one; any ZeRO stage",
    "ops.__compatible_ops__": "what has a counterpart here; nothing is built",
    "ops.adam.FusedAdam": "bias_correction=False is written in the JSON; the engine steps it on any device",
    "ops.adam.DeepSpeedCPUAdam": "bias_correction=False is written in the JSON; the engine steps it on any device",
    "ops.lamb.FusedLamb": "max_grad_norm is gradient_clipping of the JSON",
    "ops.op_builder": _BUILT,
    "runtime.sequence_parallel.ulysses_sp": "a tile's forward runs again in its backward, that of a loss too",
    "utils.zero_to_fp32.__file__": "a copy of it reads launcher's checkpoints, too",
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
        "of a checkpoint that DeepSpeed wrote; launcher's have other files, and then it is an error that says so",
    ),
    "profiling.flops_profiler": "operations by torch's formulas for what ran; ignore_list is refused",
    "runtime.activation_checkpointing.checkpointing": _KEPT,
    "checkpointing": _KEPT,
    "DeepSpeedOptimizer": _KINDS,
    "launcher.runner.EXPORT_ENVS": "holds what a program adds; what goes to other nodes anyway is in docs/scale.md",
    "runtime.base_optimizer.DeepSpeedOptimizer": _KINDS,
    "runtime.base_optimizer.ZeROOptimizer": _KINDS,
    "runtime.checkpoint_engine": "load() takes tensors and plain values only",
    "runtime.bf16_optimizer.BF16_Optimizer": _KINDS,
    "runtime.fp16.fused_optimizer.FP16_Optimizer": _KINDS,
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": _KINDS,
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": _KINDS,
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": _KINDS,
    "runtime.config.DeepSpeedConfig": "read-only; all wrong keys are reported at once",
    "runtime.config.DeepSpeedConfigError": _OURS,
    "runtime.precision_config": _SHOWN,
    "runtime.zero.config.DeepSpeedZeroConfig": _SHOWN,
    "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig": _SHOWN,
    "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig": _SHOWN,
    "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig": _SHOWN,
    "monitor.config.DeepSpeedMonitorConfig": _SHOWN,
    "runtime.engine.DeepSpeedEngine": "launcher's engine",
    "runtime.engine.DeepSpeedEngine.backward": "the loss that it returns is detached",
    "runtime.engine.DeepSpeedEngine.compile": "compiles the blocks of the model, one by one",
    "runtime.engine.DeepSpeedEngine.config": "the JSON resolved, as a dict",
    "runtime.engine.DeepSpeedEngine.no_sync": "works at every stage; stages 2 and 3 hold the whole gradient meanwhile",
    "runtime.engine.DeepSpeedEngine.offload_states": "works at every stage; lp_params and lp_grads are refused",
    "runtime.engine.DeepSpeedEngine.save_checkpoint": "launcher's format, which loads on any number of ranks",
    "runtime.engine.DeepSpeedEngine.load_checkpoint": "both formats load; custom_load_fn is refused; "
    "it returns the directory, and the script's own client state",
    "runtime.engine.DeepSpeedEngine.get_wall_clock_timers": "milliseconds by launcher's names of the phases",
    "runtime.engine.DeepSpeedEngine.timers": "launcher's timers: `with timers(name)`",
    "runtime.engine.DeepSpeedEngine.tput_timer": "the engine alone starts and stops it; off without steps_per_print",
    "runtime.pipe.engine.PipelineEngine": "the same engine: a model in stages is trained with train_batch()",
    "runtime.pipe.engine.DeepSpeedEngine": "launcher's engine",
    "DeepSpeedEngine": "launcher's engine",
    "PipelineEngine": "the same engine: a model in stages is trained with train_batch()",
    "runtime.pipe.schedule": "to read, draw and test; the engine runs the schedules of pipeline.schedule",
    "runtime.pipe.module.PipelineError": _OURS,
    "runtime.zero.utils.ZeRORuntimeException": _OURS,
    "runtime.zero.utils.is_zero_supported_optimizer": "true of every torch optimizer",
    "utils.exceptions.DeprecatedException": _OURS,
    "utils.DeprecatedException": _OURS,
    **{
        f"runtime.zero.{module}.estimate_zero{stage}_model_states_mem_needs{form}": _BY_RULE
        for module, stage in (("stage3", 3), ("stage_1_and_2", 2))
        for form in ("", "_all_cold", "_all_live")
    },
    "runtime.zero.register_external_parameter": "not needed, and does nothing",
    "runtime.zero.partition_parameters.register_external_parameter": "not needed, and does nothing",
    "runtime.zero.partition_parameters.unregister_external_parameter": "not needed, and does nothing",
    "zero.register_external_parameter": "not needed, and does nothing",
    "runtime.zero.partition_parameters.ZeroParamType": "launcher never has REMOTE",
    "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": "leaves dtypes alone",
    "utils.instrument_w_nvtx": _NVTX,
    "utils.nvtx.instrument_w_nvtx": _NVTX,
    "runtime.utils.partition_balanced": "the same heaviest part; among equal cuts it may take another",
    "runtime.zero.GatheredParameters": "what is gathered inside stays gathered in forwards inside",
    "utils.groups": "of the newest engine; of all ranks before there is one",
    "utils.zero_to_fp32": "reads launcher's checkpoints, too",
    "parameter.ds_id": "only a sharded parameter has one, while it is not gathered in its module",
    "parameter.ds_persist": "false: a parameter that is kept whole is a plain one",
    "parameter.ds_active_sub_modules": "always empty",
    "parameter.ds_external_parameters": "always empty",
}
"""Name below `deepspeed`, or the beginning of one -> how it is not the same. The longest counts."""


def difference_of(name: str) -> str:
    """Return how a name that is here is not the same; "" where it is."""
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        if (found := DIFFERS.get(".".join(parts[:number]))) is not None:
            return found
    return ""
