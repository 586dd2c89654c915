"""DeepSpeed names that are not available: the reasons, the alternatives, and the errors that report them.

One table serves people (docs/deepspeed_api.md is written from it) and scripts (error messages quote it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import LauncherError

PACKAGE = "deepspeed"
ELSEWHERE = "with DeepSpeed installed, `launch --no_deepspeed_shim ...` runs the script on DeepSpeed itself"


class NotHere(LauncherError, AttributeError):
    """A DeepSpeed name that is not available."""


class NoSuchModule(LauncherError, ModuleNotFoundError):
    """A DeepSpeed module that is not available."""


@dataclass(frozen=True)
class Refusal:
    """The reason why something is not available.

    Args:
        why: one sentence, without the period.
        instead: what to use instead; "" if only DeepSpeed itself provides it.
    """

    why: str
    instead: str = ""


INSIDE = Refusal(
    "it is internal to DeepSpeed's engine, and launcher's engine has no counterpart",
    "use the engine's methods that docs/deepspeed_api.md lists",
)
PARTS = Refusal(
    "it is internal to DeepSpeed's ZeRO, which uses a different shard layout",
    "read and change values through deepspeed.zero.GatheredParameters and deepspeed.utils.safe_get_full_fp32_param "
    "and similar functions",
)
EXPERTS = Refusal(
    "it is internal to DeepSpeed's MoE layers",
    'use deepspeed.moe.layer.MoE, or a Hugging Face model with "expert_parallel": {"size": N} in the JSON',
)
SEQUENCES = Refusal(
    "this form of sequence parallelism is not available",
    "use sequence_parallel_size in the JSON, UlyssesSPAttentionHF, or DistributedAttention",
)
INFERENCE = Refusal(
    "inference kernels are not available: launcher is for training",
    "generate with the model itself: transformers' generate() works at every ZeRO stage",
)
COMPRESSION = Refusal("model compression and quantization are not available", "train the uncompressed model")
KERNELS = Refusal(
    "DeepSpeed's GPU kernels are not available", "use torch's operators, or the transformers model"
)
BUILDERS = Refusal(
    "launcher does not build DeepSpeed's C++ and CUDA operators",
    "nothing has to be built: optimizers and offload work without them",
)
DEVICES = Refusal(
    "only CUDA devices and CPUs are supported", "use get_accelerator(), which returns this rank's device"
)
TUNING = Refusal(
    "the autotuner is not available",
    "`launch plan` reports which settings fit in memory before a run",
)
PASSES = Refusal(
    "DeepCompile's compiler passes are not available",
    "engine.compile() compiles the model's blocks with torch.compile",
)
CONVERSION = Refusal(
    "DeepSpeed's functions for checkpoint files are not available",
    "engine.load_checkpoint() loads launcher's and DeepSpeed's checkpoints on any number of ranks and at any stage, "
    "without conversion",
)
KEYS = Refusal(
    "config keys are not provided as constants",
    "write the key as a string; docs/config.md lists all keys",
)
SECTIONS = Refusal(
    "it is internal to DeepSpeed's config parsing",
    "read sections from deepspeed.DeepSpeedConfig(...) or engine.config",
)
PIPES = Refusal(
    "it is internal to DeepSpeed's pipeline engine, and launcher's stages use different schedules",
    "set pipeline.schedule in the JSON",
)
WRITERS = Refusal(
    "DeepSpeed's file writers are not available",
    "engine.save_checkpoint() writes in the background as configured in the JSON",
)
RUNNERS = Refusal("multi-node runs cannot be started from Python", "use `launch --hostfile ...`")
SAMPLING = Refusal(
    "it is internal to DeepSpeed's data pipeline",
    "use the JSON section data_efficiency, which docs/config.md describes",
)
SPARSE = Refusal("gradients of embeddings are always dense", "remove sparse=True from nn.Embedding")
SCALES = Refusal(
    "the engine scales the loss itself", "read engine.loss_scale(), and configure the JSON section fp16"
)
OPTIMIZERS = Refusal(
    "the optimizer is not available",
    "use one that docs/config.md lists under optimizer.type, or pass initialize(optimizer=...)",
)

ENGINE: Mapping[Refusal, str] = {
    TUNING: "autotuning_enabled autotuning_metric autotuning_profile_model_info autotuning_model_info",
    EXPERTS: "expert_parallel_group expert_data_parallel_group moe_layers load_moe_state_dict gate_modules",
    PASSES: "register_compile_pass is_deepcompile_enabled is_deepcompile_active get_deepcompile_backend "
    "compile_autosp compile_autotp get_compile_time",
    SPARSE: "sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain sparse_all_gather",
    CONVERSION: "save_zero_checkpoint save_non_zero_checkpoint checkpoint_engine",
    SAMPLING: "random_ltd_enabled random_ltd_config random_ltd_scheduler set_custom_curriculum_learning_schedule "
    "set_data_post_process_func",
    SCALES: "dynamic_loss_scale_args",
    Refusal(
        "gradients are reduced during backward", "call backward() and step(); no_sync() defers the reduction"
    ): "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback coalesce_grad_reduction",
    Refusal(
        "launcher's timers have different names",
        "use get_wall_clock_timers(), or wall_clock_breakdown and timers in the JSON",
    ): "engine_timers engine_timers_cache print_forward_breakdown fwd_duration",
    Refusal(
        "the engine does not keep the arguments of initialize()", "keep a reference yourself"
    ): "client_optimizer client_lr_scheduler basic_optimizer collate_fn training_data",
}
"""Reason -> methods and attributes of DeepSpeed's engine."""

REFUSED: Mapping[str, Refusal] = {
    "accelerator": DEVICES,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator": Refusal(
        "it does not apply to CUDA devices and CPUs", "call torch directly"
    ),
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.build_extension": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.create_op_builder": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.get_op_builder": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.op_builder_dir": BUILDERS,
    "accelerator.abstract_accelerator.DeepSpeedAccelerator.set_compile_backend": Refusal(
        "a global compile backend cannot be set", "pass it in the call: engine.compile(backend=...)"
    ),
    "accelerator.real_accelerator": DEVICES,
    "autotuning": TUNING,
    "checkpoint": CONVERSION,
    "comm": Refusal(
        "it is internal to DeepSpeed's communication",
        "deepspeed.comm provides every function of torch.distributed",
    ),
    "comm.ccl": DEVICES,
    "comm.mori": DEVICES,
    "comm.config": SECTIONS,
    "comm.constants": KEYS,
    "compat": INSIDE,
    "compile": PASSES,
    "compression": COMPRESSION,
    "constants": KEYS,
    "datastates": WRITERS,
    "elasticity": Refusal("the elastic agent is not available", "use `launch --max_restarts N ...`"),
    "env_report": Refusal("the operator report is not available", "use `launch check`"),
    "git_version_info": INSIDE,
    "inference": INFERENCE,
    "io": WRITERS,
    "launcher": RUNNERS,
    "linear": Refusal("layers with built-in LoRA adapters are not available", "use PEFT's LoRA"),
    "model_implementations": INFERENCE,
    "module_inject": Refusal(
        "layers cannot be replaced manually",
        "set tensor_parallel in the JSON; its partition_config specifies custom layers",
    ),
    "module_inject.auto_ep": EXPERTS,
    "module_inject.containers": INFERENCE,
    "moe": EXPERTS,
    "monitor": Refusal(
        "it is internal to DeepSpeed's metric writers",
        "use deepspeed.monitor.monitor.MonitorMaster, or tensorboard, csv_monitor, wandb and comet in the JSON",
    ),
    "nvme": Refusal("DeepSpeed's NVMe benchmarks are not available", "use `launch bench io`"),
    "ops": KERNELS,
    "ops.adam": OPTIMIZERS,
    "ops.fp_quantizer": COMPRESSION,
    "ops.lion": OPTIMIZERS,
    "ops.lamb": OPTIMIZERS,
    "ops.op_builder": BUILDERS,
    "ops.compile": BUILDERS,
    "ops.gds": BUILDERS,
    "ops.pin_memory": BUILDERS,
    "ops.quantizer": COMPRESSION,
    "ops.random_ltd": SAMPLING,
    "parameter": PARTS,
    "pipe": PIPES,
    "profiling": KEYS,
    "profiling.config": SECTIONS,
    "profiling.flops_profiler": Refusal(
        "it is internal to DeepSpeed's profiler", "use get_model_profile() or FlopsProfiler"
    ),
    "replace_transformer_layer": INFERENCE,
    "runtime": INSIDE,
    "runtime.activation_checkpointing": Refusal(
        "it is internal to DeepSpeed's activation checkpointing",
        "use deepspeed.checkpointing.checkpoint(), configure() and reset()",
    ),
    "runtime.activation_checkpointing.config": SECTIONS,
    "runtime.base_optimizer": PARTS,
    "runtime.bf16_optimizer": PARTS,
    "runtime.checkpoint_engine": WRITERS,
    "runtime.chunked_cross_entropy": Refusal(
        "the chunked loss is not available as a function",
        "the engine computes the loss of causal LMs in tiles automatically",
    ),
    "runtime.config": KEYS,
    "runtime.config.DeepSpeedConfig": Refusal(
        "this attribute is not provided", "docs/config.md lists the supported keys"
    ),
    "runtime.config_utils": SECTIONS,
    "runtime.constants": KEYS,
    "runtime.data_pipeline": SAMPLING,
    "runtime.domino": Refusal(
        "Domino is not available", "tensor_parallel overlaps its communication automatically"
    ),
    "runtime.fp16": PARTS,
    "runtime.fp16.onebit": OPTIMIZERS,
    "runtime.fp16.loss_scaler": SCALES,
    "runtime.engine.DeepSpeedEngine": Refusal(
        "neither launcher's engine nor its model has this attribute",
        "use the methods that docs/deepspeed_api.md lists",
    ),
    **{
        f"runtime.engine.DeepSpeedEngine.{name}": refusal
        for refusal, names in ENGINE.items()
        for name in names.split()
    },
    "runtime.pipe.engine.PipelineEngine": Refusal(
        "neither launcher's engine nor its model has this attribute",
        "use the methods that docs/deepspeed_api.md lists",
    ),
    "runtime.pipe.module.PipelineModule": PIPES,
    "runtime.hybrid_engine": INFERENCE,
    "runtime.hybrid_engine_graph": INFERENCE,
    "runtime.lr_schedules": Refusal(
        "schedules cannot be built from command-line arguments", "use the JSON section scheduler"
    ),
    "runtime.pipe": PIPES,
    "runtime.precision_config": SECTIONS,
    "runtime.rollout": INFERENCE,
    "runtime.sequence_parallel": SEQUENCES,
    "runtime.sparse_tensor": SPARSE,
    "runtime.state_dict_factory": CONVERSION,
    "runtime.superoffload": Refusal(
        "SuperOffload is not available",
        "use offload_optimizer with device cpu, which runs the step on the CPU",
    ),
    "runtime.tensor_parallel": Refusal(
        "tensor parallelism has no Python API", "set tensor_parallel.autotp_size in the JSON"
    ),
    "runtime.torch_autocast": INSIDE,
    "runtime.utils": INSIDE,
    "runtime.weight_quantizer": COMPRESSION,
    "runtime.zenflow": Refusal("ZenFlow is not available", "use plain offload_optimizer"),
    "runtime.zero": PARTS,
    "runtime.zero.muon": Refusal(
        "Muon is not available as a class", 'set {"optimizer": {"type": "Muon"}} in the JSON'
    ),
    "runtime.zero.config": SECTIONS,
    "runtime.zero.offload_config": SECTIONS,
    "runtime.zero.leaf_module_config": SECTIONS,
    "sequence": SEQUENCES,
    "utils": INSIDE,
    "utils.groups._create_expert_data_and_model_parallel": EXPERTS,
    "utils.groups.expert_tensor_parallel_world_size": EXPERTS,
    "utils.comms_logging": Refusal(
        "it is internal to DeepSpeed's communication log", "use deepspeed.comm.log_summary()"
    ),
    "utils.config": SECTIONS,
    "utils.debug": Refusal(
        "DeepSpeed's debugging helpers are not available", "print the names in model.named_parameters()"
    ),
    "utils.numa": RUNNERS,
    "utils.tensor_fragment": PARTS,
    "utils.mixed_precision_linkage": PARTS,
    "utils.static_cache": INFERENCE,
    "utils.zero_to_fp32": CONVERSION,
    "utils.zero_to_torch": CONVERSION,
    # top-level names
    "DeepSpeedHybridEngine": INFERENCE,
    "DeepSpeedInferenceConfig": INFERENCE,
    "DeepSpeedTransformerConfig": KERNELS,
    "DeepSpeedTransformerLayer": KERNELS,
    "DualPipeVEngine": PIPES,
    "DualPipeVModule": PIPES,
    **dict.fromkeys(
        ("KV", "MLA_KV", "MLA_Q", "NOT_HEAD_BLOCKED", "QUERY", "resolve_per_head_muon_after_sharding"),
        Refusal(
            "the head layout of a projection cannot be specified", "tensor_parallel detects it automatically"
        ),
    ),
    **dict.fromkeys(
        ("merge_tp_model_init_into_config", "record_tp_model_init_args", "set_autotp_mode"),
        Refusal("tensor parallelism is configured only in the JSON", "set tensor_parallel.autotp_size"),
    ),
    "default_inference_config": INFERENCE,
}
"""Dotted name below `deepspeed`, or a dotted prefix -> why it is not available. The longest match is used."""

_ALL = Refusal("launcher provides no such name")


def refusal_of(name: str) -> Refusal:
    """Return why a name below `deepspeed` is not available."""
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        if (found := REFUSED.get(".".join(parts[:number]))) is not None:
            return found
    return _ALL


def missing(name: str, shown: str = "") -> tuple[str, dict[str, str]]:
    """Return the message and the keyword arguments of the error about a name below `deepspeed`.

    Args:
        shown: the name as the script wrote it, if different.
    """
    refusal = refusal_of(name)
    fix = f"{refusal.instead}; {ELSEWHERE}" if refusal.instead else ELSEWHERE
    return f"{shown or f'{PACKAGE}.{name}'} is not available: {refusal.why}", {"fix": fix}
